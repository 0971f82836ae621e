"""Models of `impl` as a run opens them on a device: what is computed before the first weight is asked for, and what is afterwards."""

import builtins
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from blackswan.falsifiers.subjects.conversion import config_of
from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.falsifiers.subjects.patching import standing_in
from blackswan.falsifiers.subjects.protocol import Session
from blackswan.impl import dispatch, pretrain, warm_up
from blackswan.impl.classifier import Adaptation, base_shapes, trainable_shapes
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.corpus import Sample
from blackswan.impl.decoder import Decoder, random_tensors
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.tensors import LazyTensors, Shapes, Tensors
from blackswan.impl.token_shards import TokenBatch
from blackswan.impl.tokens import ByteTokens

_SEEDS = count(1)
"""Nothing that was drawn is drawn again, so that nobody needs to keep it."""
SUMS = ("average_gradients", "clip_by_global_norm", "adamw_step", "lm_cross_entropy")
"""Operations over all that is trained or over the vocabulary, which no model of fewer layers has as wide."""


class CompilationError(Exception):
    """An error of a compiler's own class, which has no other base than Exception, as Triton's have."""


ERRORS = vars(builtins) | {"OutOfMemoryError": torch.OutOfMemoryError, "CompilationError": CompilationError}


class Opening(Session):
    """A model that is opened on the device: a classifier, or a decoder to train from random weights.

    `settings` are a classifier's that the workload does not have. A CPU is taken for a kind of device that has to be warmed up, unless
    `feigned` is false.
    """

    def __init__(self, work: Workload, kind: str, place: torch.device, settings: Mapping[str, Any]) -> None:
        self._work, self._place, self._settings = work, place, settings
        made: dict[str, tuple[Callable[[], Any], Callable[[], None]]] = {
            "classifier": (self._classifier, self._train),
            "decoder": (self._decoder, self._pretrain),
        }
        self._open, self._use = made[kind]
        self._asked: list[str] = []
        self._computed: list[str] = []
        self._before: list[str] | None = None
        self._model: Any = None
        self._longest, self._readable, self._draws = 0, True, False
        self._failures: list[str] = []
        self._results: list[tuple[str, StorageWeakRef]] = []
        self._still_held: list[str] = []

    def open(self, failing: str | None = None, passes: str = "", error: str = "RuntimeError", feigned: bool = True) -> None:
        """Opens it. The operation `failing` raises that error of Python's, torch's or a compiler's, forward or (`passes` is backward) in
        the backward pass. Nobody sleeps meanwhile."""
        with ExitStack() as stack:
            if failing is not None:
                wrong = (_backwards if passes == "backward" else _failing)(failing, ERRORS[error], self._failures.append)
                stack.enter_context(dispatch.replaced({failing: wrong}))
                stack.enter_context(mock.patch.object(time, "sleep"))
            if feigned:
                stack.enter_context(mock.patch.object(warm_up, "COLD", ()))
            if self._work.seed % 2:  # as a program opens a model that is to answer
                stack.enter_context(torch.no_grad())
            stack.enter_context(dispatch.wrapping(self._around))
            drawn = torch.get_rng_state()
            self._model = self._open()
            self._draws = not torch.equal(drawn, torch.get_rng_state())

    def draws(self) -> bool:
        """Whether the opening drew from the random numbers that all of the program shares."""
        return self._draws

    def interrupted(self, failing: str, by: str = "KeyboardInterrupt") -> str:
        """The name of the exception that comes out where Ctrl-C, or an end of the process (SystemExit), comes while the operation is
        computed. Another one passes."""
        try:
            self.open(failing, error=by)
        except (KeyboardInterrupt, SystemExit) as end:
            if failing not in str(end):
                raise
            return type(end).__name__
        except Exception as error:
            return type(error).__name__
        return "none"

    def unreadable(self) -> str:
        """The name of the exception that comes out where the first weight cannot be read, which is an OSError."""
        self._readable = False
        try:
            self.open()
        except Exception as error:
            return type(error).__name__
        return "none"

    def asked(self) -> list[str]:
        """The weights that were asked for."""
        return self._asked

    def before(self) -> list[str]:
        """What was computed before the first weight was asked for: operations, dtypes, widths and whether 16 divides the number of rows,
        and those of the backward pass."""
        return sorted(set(self._computed if self._before is None else self._before))

    def longest(self) -> int:
        """The most tokens that a text of all that was computed has had, padding among them."""
        return self._longest

    def still_held(self) -> list[str]:
        """Names the results from before a failure that were still held when the next operation was computed."""
        return self._still_held

    def used(self) -> list[str]:
        """What a step of training on the open model, and an answer, compute."""
        self._computed.clear()
        with dispatch.wrapping(self._around):
            self._use()
        return sorted(set(self._computed))

    def _classifier(self) -> ClassifyPipeline:
        work, architecture = self._work, config_of(self._work.scalars)
        config = ClassifyConfig(
            num_classes=work.classes,
            lora_rank=work.rank,
            lora_alpha=work.alpha,
            lora_targets=work.targets,
            quantize_nf4=work.nf4,
            dtype=work.dtype,
            backend=work.backend,
            max_seq_len=work.seq,
            batch_size=work.batch,
            **self._settings,
        )
        shapes = trainable_shapes(architecture, Adaptation.of(config))
        drawn = random_tensors(architecture, work.seed)
        base = _Watched({name: drawn[name] for name in base_shapes(architecture)}, self._noted)
        trainable = _Watched({name: torch.full(shape, 0.01) for name, shape in shapes.items()}, self._noted)
        return ClassifyPipeline(architecture, config, base, trainable, ByteTokens(work.seq), device=self._place)

    def _train(self) -> None:
        classes = self._work.classes
        labels = [(1,) * classes if self._settings.get("multi_label") else index % classes for index in range(4)]
        samples = [Sample(text, label) for text, label in zip(("rm -rf", "date", "ls -l", "cp a b"), labels, strict=True)]
        if isinstance(self._settings.get("class_weights"), str):  # a run takes them from its samples
            self._model.class_weights = (1.0,) * classes
            self._model.start(None)
        self._model.train_batch(samples)
        self._model.forward_only(samples, probabilities=True)

    def _decoder(self) -> Decoder:
        architecture = config_of(self._work.scalars)
        drawn = _Watched(random_tensors(architecture, self._work.seed), self._noted)
        with standing_in(random_tensors, lambda *_: drawn):
            return pretrain.random_decoder(architecture, seed=next(_SEEDS), device=self._place)

    def _pretrain(self) -> None:
        ids = torch.arange(4 * self._work.seq, device=self._place).view(4, -1) % self._work.vocab
        step = pretrain.StepFn(self._model, total_steps=1, micro_batch=4, learning_rate=1e-3)
        step.train(TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool)))

    def _noted(self, name: str) -> None:
        if self._before is None:
            self._before = list(self._computed)
        self._asked.append(name)
        if not self._readable:
            raise OSError(f"{name} cannot be read")

    def _around(self, _: str, operation: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        said = _said(operation, arguments)
        self._computed.append(said)
        if operation == "embedding":
            self._longest = max(self._longest, arguments["input_ids"].shape[1])
        if self._failures:
            gc.collect()
            held = (each for each, storage in self._results if not storage.expired())  # type: ignore[no-untyped-call]  # torch
            self._still_held += held
            self._failures.clear()
            self._results.clear()
        result = function(**arguments)
        if isinstance(result, Tensor) and result.ndim > 2:
            self._results.append((said, StorageWeakRef(result.untyped_storage())))  # type: ignore[no-untyped-call]  # torch
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda _: self._computed.append(f"backward: {said}"))  # type: ignore[no-untyped-call]  # torch
        return result


class _Watched(LazyTensors):
    """Tensors that tell when one of them is asked for."""

    def __init__(self, tensors: Tensors, tell: Callable[[str], None]) -> None:
        self._tensors, self._tell = tensors, tell

    @property
    def shapes(self) -> Shapes:
        return {name: tuple(value.shape) for name, value in self._tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        self._tell(name)
        return self._tensors[name]


def _said(operation: str, arguments: Mapping[str, Any]) -> str:
    """The operation with dtype and width (last axis) of each array of numbers that it is given; of [batch, seq, …] whether 16, for which
    Triton compiles a kernel of its own, divides the number of tokens."""
    return f"{operation}({', '.join(_kinds(operation, arguments))})"


def _kinds(operation: str, arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(arguments.items()):
        if isinstance(value, Tensor) and value.is_floating_point():
            width = f" [{value.shape[-1]}]" if value.ndim and operation not in SUMS else ""
            width += " by 16" if value.ndim > 2 and value.shape[:2].numel() % 16 == 0 else ""
            yield f"{name} {str(value.dtype).removeprefix('torch.')}{width}"


def _failing(operation: str, error: type[BaseException], tell: Callable[[str], None]) -> Callable[..., Any]:
    def failing(**_: Any) -> Any:
        tell(operation)
        raise error(f"{operation} does not compile")

    return failing


def _backwards(operation: str, error: type[BaseException], tell: Callable[[str], None]) -> Callable[..., Any]:
    """The right operation, whose backward pass fails."""
    failing = _failing(operation, error, tell)
    return lambda **arguments: _NoBackward.apply(OPERATIONS[operation](**arguments), failing)  # type: ignore[no-untyped-call]  # torch


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, failing: Callable[[], None]) -> Tensor:
        ctx.failing = failing
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        ctx.failing()
        raise AssertionError("it fails")
