"""Wrong orders of warming a device up and putting weights there, and warm-ups of less than the model computes."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


def _after_upload(warmed: Step, device: Any, rehearse: Step, load: Step) -> Any:
    loaded = load()
    return warmed(device, rehearse, lambda: loaded)


def _swallowed(warmed: Step, device: Any, rehearse: Step, load: Step) -> Any:
    try:
        return warmed(device, rehearse, load)
    except RuntimeError:
        return load()


def _interrupted(warmed: Step, device: Any, rehearse: Step, load: Step) -> Any:
    def asked() -> None:
        try:
            rehearse()
        except KeyboardInterrupt as error:
            raise RuntimeError("interrupted") from error

    return warmed(device, asked, load)


def _left_out(_: Step, _device: Any, _rehearse: Step, load: Step) -> Any:
    return load()


def _everywhere(_: Step, _device: Any, rehearse: Step, load: Step) -> Any:
    rehearse()
    return load()


wrong_steps(
    "impl.pipeline:warmed",
    warm_up_after_upload=("Kernels are compiled when the weights are there.", _after_upload),
    warm_up_error_swallowed=("A warm-up that fails is passed over, and the weights go up.", _swallowed),
    warm_up_left_out=("The first step compiles.", _left_out),
    warm_up_fails_by_interrupts=("Ctrl-C is told as a device that cannot compute.", _interrupted),
    warm_up_on_the_cpu_too=("Computes first also where nothing is compiled.", _everywhere),
)
wrong_steps(
    "impl.pretrain:warmed",
    warm_up_of_decoder_after_upload=("A decoder's kernels are compiled when its weights are there.", _after_upload),
    warm_up_error_of_decoder_swallowed=("A decoder's warm-up that fails is passed over.", _swallowed),
)


@wrong_step("impl.pipeline:warmed")
def warm_up_explains_weights_that_cannot_be_read(warmed: Step, device: Any, rehearse: Step, load: Step) -> Any:
    """A damaged checkpoint is told as a device that cannot compute."""
    try:
        return warmed(device, rehearse, load)
    except OSError as error:
        raise RuntimeError(f"the model's computation cannot run on {device} ({error})") from error


@wrong_step("impl.pipeline:warmed")
def warm_up_explains_few_errors(warmed: Step, device: Any, rehearse: Step, load: Step) -> Any:
    """A compiler that is not there ends the program, and not with an explanation."""
    try:
        return warmed(device, rehearse, load)
    except RuntimeError as error:
        raise error if type(error.__cause__) is RuntimeError else error.__cause__ or error from None


wrong_steps(
    "impl.pipeline:SHAPES",
    warm_up_of_multiples_of_16=("Numbers of tokens that 16 divides alone are computed before.", lambda _: ((2, 16), (3, 16))),
)
wrong_steps(
    "impl.pretrain:SHAPES",
    warm_up_of_no_multiples_of_16=("Numbers of tokens that 16 divides are not computed before.", lambda _: ((3, 5),)),
)


@wrong_step("impl.pipeline:ClassifyPipeline._rehearse")
def warm_up_of_longer_texts(rehearse: Step, pipeline: Any, make: Any) -> None:
    """The small model's texts are longer than any of the run: a run on texts of few tokens cannot start."""
    kept = pipeline.config
    trainer = pipeline._trainer
    pipeline.config = replace(kept, max_seq_len=max(16, kept.max_seq_len))
    pipeline._trainer = lambda *given: _with(pipeline, kept, trainer, *given)
    try:
        rehearse(pipeline, make)
    finally:
        pipeline.config = kept
        del pipeline._trainer


def _with(pipeline: Any, config: Any, trainer: Step, *given: Any) -> Any:
    longer, pipeline.config = pipeline.config, config
    try:
        return trainer(*given)
    finally:
        pipeline.config = longer


@wrong_step("impl.trainer:Trainer.train_batch")
def warm_up_of_answers_alone(train: Step, self: Any, batch: Any) -> Any:
    """The warm-up makes no step: the backward pass is compiled by the first one."""
    return None if self.classifier.config.layers == 2 else train(self, batch)


@wrong_step("impl.pipeline:small")
def warm_up_of_one_layer(small: Step, architecture: Any) -> Any:
    """The first layer alone, through whose input no gradient passes."""
    return replace(small(architecture), layers=1)


@wrong_step("impl.pipeline:small")
def warm_up_of_other_widths(small: Step, architecture: Any) -> Any:
    """The small model is narrow as well."""
    return replace(small(architecture), intermediate=architecture.intermediate // 2)


@wrong_step("impl.warm_up:WarmUpFailed")
def warm_up_fails_without_a_reason(failed: Step, _: str) -> Any:
    """A failure that does not say what failed."""
    return failed("the warm-up failed")


@wrong_step("impl.pipeline:ClassifyPipeline._rehearse")
def warm_up_of_one_label_alone(rehearse: Step, pipeline: Any, make: Any) -> None:
    """The small model's samples have one label, and no class has a weight."""
    kept = pipeline.config
    pipeline.config = replace(kept, multi_label=False, class_weights=None)
    try:
        rehearse(pipeline, make)
    finally:
        pipeline.config = kept


@wrong_step("impl.pipeline:warmed")
def warm_up_tried_again_beside_the_first(warmed: Step, device: Any, rehearse: Step, load: Step) -> Any:
    """A warm-up that finds no memory is tried again while its error still holds all that the first try took."""

    def twice() -> None:
        try:
            rehearse()
        except torch.OutOfMemoryError:
            rehearse()

    return warmed(device, twice, load)


_PYTHONS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


@wrong_step("impl.pipeline:warmed")
def warm_up_explains_errors_of_python_alone(warmed: Step, device: Any, rehearse: Step, load: Step) -> Any:
    """Errors of a compiler's own class, such as Triton's, end the program, and not with an explanation."""
    try:
        return warmed(device, rehearse, load)
    except RuntimeError as error:
        if error.__cause__ is None or isinstance(error.__cause__, _PYTHONS):
            raise
        raise error.__cause__ from None


@wrong_step("impl.pipeline:warmed")
def warm_up_explains_exits(warmed: Step, device: Any, rehearse: Step, load: Step) -> Any:
    """The end of the process is told as a device that cannot compute."""

    def asked() -> None:
        try:
            rehearse()
        except SystemExit as error:
            raise RuntimeError("ended") from error

    return warmed(device, asked, load)


wrong_step(
    "impl.warm_up:with_gradients",
    name="warm_up_where_gradients_are_off",
    doc="No model is opened where gradients are switched off.",
)(lambda _: nullcontext())


@wrong_step("impl.warm_up:Constant.__getitem__")
def warm_up_of_random_numbers(_: Step, self: Any, name: str) -> Any:
    """The small model's matrices are drawn from the random numbers that all of the program shares."""
    shape = self.shapes[name]
    return (torch.ones(shape) if len(shape) == 1 else 0.01 * torch.randn(shape)).to(self._device, self._dtype)
