"""Wrong workers: how they find each other, what they tell each other, and from what they go on together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partialmethod
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps


@wrong_step("impl.group:_places")
def address_alone_refused(places: Any, environment: Any) -> Any:
    """A process that is alone is refused where the cluster names an address."""
    if "MASTER_ADDR" in environment and "RANK" not in environment:
        raise ValueError("the environment has MASTER_ADDR, but not RANK")
    return places(environment)


@wrong_step("impl.group:connected")
def addresses_without_brackets(connected: Any, rank: int, size: int, device: Any, meeting: str, **options: Any) -> Any:
    """Workers do not find each other where the address is one of IPv6."""
    return connected(rank, size, device, meeting.replace("[", "").replace("]", ""), **options)


@wrong_step("impl.group:connected")
@contextmanager
def patience_for_the_meeting_alone(connected: Any, *given: Any, **options: Any) -> Any:
    """Workers that have met wait for each other as long as torch does by default."""
    from torch import distributed

    begin = distributed.init_process_group

    def patient(*places: Any, **named: Any) -> None:
        begin(*places, **{name: value for name, value in named.items() if name != "timeout"})

    with mock.patch.object(distributed, "init_process_group", patient), connected(*given, **options) as group:
        yield group


@wrong_step("impl.group:DistributedGroup._reported")
@contextmanager
def lost_worker_is_not_named(_: Any, _group: Any, _what: str) -> Iterator[None]:
    """The message about a worker that is gone has torch's words alone, and names none."""
    yield


wrong_step("impl.group:DistributedGroup.gather_text", name="workers_talk_in_letters", doc="A message with a byte that is no letter fails.")(
    lambda gather, group, text: gather(group, text.encode().decode())
)


@wrong_step("impl.group:DistributedGroup.gather_text")
def workers_talk_in_pieces(gather: Any, group: Any, text: str) -> list[str]:
    """A text of more than a kibibyte is sent in two pieces, of which each is decoded by itself."""
    content = text.encode(errors="backslashreplace")
    pieces = [gather(group, piece.hex()) for piece in (content[:1024], content[1024:])]
    return ["".join(bytes.fromhex(piece).decode() for piece in each) for each in zip(*pieces, strict=True)]


@wrong_step("impl.agreement:_shared_kind")
def shared_errors_of_few_kinds(_: Any, error: Exception) -> type[Exception]:
    """An error of a subclass, as that of a folder in use, ends several workers as another error."""
    from blackswan.impl.agreement import _RAISED_ELSEWHERE, WorkerFailed

    return type(error) if type(error) in _RAISED_ELSEWHERE else WorkerFailed


class _Unexpected(BaseException):
    """It stops a worker at once."""


@wrong_step("impl.fit:together")
@contextmanager
def shared_errors_are_those_that_are_expected(together: Any, group: Any) -> Iterator[None]:
    """An error of a kind that the program does not raise itself, as that of a library, ends a worker, and the others wait for it."""
    passed = _Unexpected()
    try:
        with together(group):
            try:
                yield
            except (OSError, ValueError, ArithmeticError, LookupError, RuntimeError):
                raise
            except Exception as error:
                raise passed from error
    except _Unexpected:
        assert passed.__cause__ is not None
        raise passed.__cause__ from None


@wrong_step("impl.agreement:_raise_first")
def first_failed_worker_alone_named(raise_first: Any, texts: Any, rank: int, own: Any) -> None:
    """Only the first of the workers that failed is named."""
    first = next(place for place, text in enumerate(texts) if text)
    raise_first([text if place == first else "" for place, text in enumerate(texts)], rank, own)


def _shared_but_for(name: str) -> Callable[..., Any]:
    """A method of a run in which the function `name` of `impl.fit`, by which workers tell each other, does nothing."""

    def method(right: Any, run: Any, *given: Any) -> Any:
        with mock.patch(f"blackswan.impl.fit.{name}", side_effect=lambda *_: nullcontext()):
            return right(run, *given)

    return method


wrong_steps(
    "impl.fit:_Run._export",
    by=_shared_but_for,
    adapters_failure_of_the_first_alone=("The others are not told that the first worker cannot write an adapter.", "together"),
)
wrong_steps(
    "impl.fit:_Run._save",
    by=_shared_but_for,
    states_failure_of_the_first_alone=("The others are not told that the first worker cannot write the state.", "together"),
)
wrong_steps(
    "impl.fit:_Run.open",
    by=_shared_but_for,
    workers_go_on_from_any_state=("Workers whose states have other tensors go on.", "require_equal"),
)


@wrong_step("impl.fit:_Run.open")
def workers_go_on_from_any_step(open_: Any, run: Any, resume: bool) -> None:
    """Workers whose states are of different places of a run go on."""
    from blackswan.impl.agreement import require_same

    def others(group: Any, what: str, text: str) -> None:
        if "progress" not in what:
            require_same(group, what, text)

    with mock.patch("blackswan.impl.fit.require_same", others):
        open_(run, resume)


@wrong_step("impl.fit:require_equal")
def first_tensor_is_blamed(equal: Any, group: Any, tensors: Any) -> None:
    """The first tensor is named, whichever differs."""
    try:
        equal(group, tensors)
    except RuntimeError as error:
        raise type(error)(f"{next(iter(tensors))} {str(error).partition(' ')[2]}") from None


@wrong_step("impl.fit:_Run._after")
def first_worker_alone_is_patient(after: Any, run: Any, record: Any) -> Any:
    """The first worker stops early, and the others go on."""
    progress = after(run, record)
    return progress if run.group.rank == 0 else replace(progress, finished=record.epoch == run.config.epochs)


@wrong_step("impl.trainer:Trainer.__init__")
def workers_without_class_weights(init: Any, *given: Any, class_weights: Any = None, **options: Any) -> None:
    """Several workers give every class the weight 1."""
    init(*given, class_weights=class_weights if options["group"].size == 1 else None, **options)


wrong_step("impl.group:_places", name="place_is_not_looked_at", doc="LOCAL_RANK may be anything.")(
    lambda places, environment: places({**environment, "LOCAL_RANK": environment.get("RANK", "0")})
)

wrong_step("impl.group:_places", name="device_by_rank", doc="A worker takes the GPU of its RANK, not of its LOCAL_RANK.")(
    lambda places, environment: (lambda rank, size, _: (rank, size, rank))(*places(environment))
)

wrong_step(
    "impl.group:_own_device", name="workers_find_no_device_themselves", doc="Several workers take auto for cuda, which may be absent."
)(lambda own, name, *place: own("cuda" if name == "auto" else name, *place))


@wrong_step("impl.commands.train:_train")
def board_of_every_worker(train: Any, options: Any, given: Any, group: Any, *others: Any) -> None:
    """Each worker writes for TensorBoard, which shows every number as often as there are workers."""
    from blackswan.impl.metrics import TensorBoard
    from blackswan.impl.pipeline import ClassifyPipeline

    board = TensorBoard(options.tensorboard) if options.tensorboard and group.rank else None
    told = {"on_step": board.step, "on_epoch": board.epoch} if board else {}
    with mock.patch.object(ClassifyPipeline, "fit", partialmethod(ClassifyPipeline.fit, **told)):
        train(options, given, group, *others)
