"""Wrong choices of a device, wrong proofs that all tensors are there, and wrong transfers: one step of `impl` replaced each."""

import itertools
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


@wrong_step("impl.device:warnings.warn", "S26")
def auto_falls_back_in_silence(*_: Any, **_options: Any) -> None:
    """No warning when auto takes the CPU."""


@wrong_step("impl.device:resolve_device")
def auto_warns_of_every_device(resolve: Step, name: str) -> Any:
    """A warning for devices that were named as well."""
    found = resolve(name)
    if name != "auto":
        warnings.warn(f"using {found}", stacklevel=2)
    return found


@wrong_step("impl.device:resolve_device", "S26")
def device_explicit_falls_back(resolve: Step, name: str) -> Any:
    """The CPU or another card instead of one that is not there."""
    try:
        return resolve(name)
    except RuntimeError:
        return resolve("auto")


@wrong_step("impl.device:resolve_device")
def device_index_dropped(resolve: Step, name: str) -> Any:
    """The first card whatever the index."""
    found = resolve(name)
    return torch.device("cuda", 0) if found.type == "cuda" else found


@wrong_step("impl.device:parse_device")
def device_names_of_cuda_alone(parse: Step, name: str) -> Any:
    """Accelerators other than CUDA's are refused, also where they are."""
    if name.partition(":")[0] not in ("cpu", "auto", "cuda"):
        raise ValueError(f"device {name!r}: expected cpu, cuda, cuda:N or auto")
    return parse(name)


@wrong_step("impl.device:_present")
def device_of_any_kind(present: Step, kind: str) -> Any:
    """Any accelerator counts as one of the kind that was asked for."""
    return max(map(present, ("cuda", "xpu", "mps", kind)))


@wrong_step("impl.device:resolve_device")
def device_hip_by_its_own_name(resolve: Step, name: str) -> Any:
    """ROCm's devices by a name that torch has no module for."""
    return torch.device("hip", resolve(name).index) if name.startswith("hip") else resolve(name)


@wrong_step("impl.device:resolve_device")
def auto_takes_any_accelerator(resolve: Step, name: str) -> Any:
    """The accelerator that torch names, which no claim was ever asked on, for auto."""
    here = torch.accelerator.current_accelerator()
    return torch.device(here.type, 0) if name == "auto" and here is not None else resolve(name)


# proof of residency


@wrong_step("impl.residency:_tensors")
def residency_of_trained_only(tensors: Step, *given: Any) -> Any:
    """LoRA, head and optimiser are not looked at."""
    return ((name, value) for name, value in tensors(*given) if not any(part in name for part in ("lora_", "score", "optimiser")))


wrong_step("impl.residency:_tensors", name="residency_without_buffers", doc="NF4 codes and absmax are not looked at.")(
    lambda tensors, *given: ((name, value) for name, value in tensors(*given) if "quantized" not in name)
)
wrong_step("impl.residency:_tensors", name="residency_of_what_is_saved", doc="Buffers that no file has are not looked at.")(
    lambda tensors, model, optimiser: (
        (name, value) for name, value in tensors(model, optimiser) if name in model.state_dict() or "optimiser" in name or " " in name
    )
)
wrong_step(
    "impl.residency:_tensors", name="residency_of_tensors_with_axes", doc="Tensors without an axis, single numbers, may be anywhere."
)(lambda tensors, *given: ((name, value) for name, value in tensors(*given) if value.dim()))
wrong_step("impl.residency:_tensors", name="residency_without_optimiser", doc="Moments are not looked at.")(
    lambda tensors, *given: ((name, value) for name, value in tensors(*given) if not name.startswith("optimiser"))
)


def _unseen(beginning: str) -> Step:
    """Leaves out the tensors whose names begin so."""
    return lambda tensors, *given: ((name, value) for name, value in tensors(*given) if not name.startswith(beginning))


wrong_steps(
    "impl.residency:_tensors",
    by=_unseen,
    residency_without_gradients=("Gradients are not looked at.", "the gradient"),
    residency_without_indices=("Tensors of the optimiser that hold no numbers with a fraction are not looked at.", "optimiser._"),
    residency_without_optimised=("A parameter that the optimiser moves, and not the model's, is not looked at.", "optimiser.parameters"),
)


wrong_steps(
    "impl.residency:_indexed",
    residency_on_the_first_card=(
        "CUDA without a number is its first device, whichever is the current one.",
        lambda _, device: torch.device(device.type, device.index or 0) if device.type == "cuda" else device,
    ),
)


@wrong_step("impl.residency:require_residency", "S26")
def residency_moves_in_silence(*_: Any) -> None:
    """No objection to a tensor elsewhere."""


def _but(said: str) -> Step:
    """`require_residency` that swallows a refusal whose text contains `said`, in which {} is the device's type."""

    def wrong(require: Step, *given: Any) -> None:
        try:
            require(*given)
        except RuntimeError as error:
            if said.format(given[-1].type) not in str(error):
                raise

    return wrong


wrong_steps(
    "impl.residency:require_residency",
    by=_but,
    residency_by_the_kind=("A model on another card than the run's passes, and trains there.", " is on {}:"),
    residency_without_memory=("A model on a card passes where the process holds no memory there.", "holds no memory"),
)


@wrong_step("impl.residency:require_residency")
def residency_by_the_memory_of_the_current_card(require: Step, *given: Any) -> None:
    """The current card is asked whether the process holds memory, and a run on another one is refused."""
    with mock.patch("torch.cuda.memory_allocated", return_value=torch.cuda.memory_allocated()):
        require(*given)


@wrong_step("impl.device:parse_device")
def device_before_a_line_end(parse: Step, name: str) -> Any:
    """A name with the end of a line behind it is taken for that of a device."""
    return parse(name.removesuffix("\n"))


@wrong_step("impl.device:parse_device")
def device_of_a_byte(parse: Step, name: str) -> Any:
    """The number of a card is a byte, so that 256 is card 0."""
    kind, _, index = name.partition(":")
    return parse(f"{kind}:{int(index) % 256}" if index.isdigit() and int(index) > 255 else name)


@wrong_step("impl.device:parse_device")
def device_of_foreign_digits(parse: Step, name: str) -> Any:
    """The second digit of a card's number may be that of any script."""
    return parse(f"{name[:-1]}{int(name[-1])}" if name[-1:].isdecimal() and name[-2:-1].isdecimal() else name)


wrong_step(
    "impl.device:_present", name="device_listed_by_its_driver", doc="A card that the driver lists counts, though CUDA cannot use it."
)(lambda present, kind: torch.cuda.device_count() if kind == "cuda" else present(kind))
wrong_steps("impl.device:MAX_INDEX", device_of_any_number=("A card may have any number up to 99.", lambda _: 99))


# to the device and back


@wrong_step("impl.optimiser:AdamW.state")
def sync_lora_rounded(state: Step, self: Any) -> Any:
    """LoRA comes back rounded to bfloat16."""
    return {name: value.bfloat16().to(value.dtype) if name.startswith("trainable/") else value for name, value in state(self).items()}


@wrong_step("impl.decoder:Layer", "S29")
def sync_layers_swapped(layer: Step, config: Any, path: str, tensors: Any, nf4: bool) -> Any:
    """Output projections of two layers change places at upload."""
    made = layer(config, path, tensors, nf4)
    other = f"model.layers.{config.layers - 1 - int(path.rpartition('.')[2])}"
    made.self_attn.o_proj.weight = torch.nn.Parameter(tensors[f"{other}.self_attn.o_proj.weight"], requires_grad=False)
    return made


wrong_step("impl.classifier:Head.__init__", name="sync_head_bias_dropped", doc="The head's bias starts at zero.")(
    lambda init, self, weight, bias: init(self, weight, torch.zeros_like(bias))
)


@wrong_step("impl.operations.layers:rms_norm")
def norm_rows_wrap(norm: Step, x: Any, *given: Any) -> Any:
    """Rows beyond the eighth are counted from the first again."""
    y = norm(x, *given)
    return torch.cat([y[:8], y[:8].repeat(len(y) // 8, *[1] * (y.dim() - 1))])[: len(y)] if len(y) > 8 else y


_asked = itertools.count()


@wrong_step("impl.operations.layers:rms_norm")
def norm_never_the_same(norm: Step, x: Any, *given: Any) -> Any:
    """A sum is added up in the order in which its parts are there."""
    y = norm(x, *given)
    return torch.nextafter(y, y + 1) if next(_asked) % 2 else y


@wrong_step("impl.fused.products:fastest_of")
def algorithm_by_its_rank(fastest: Step, calls: Any, expected: Any, out: Any, times: Any) -> int:
    """The fastest is looked up among all algorithms by its place among those that give equal bits."""
    taken: list[Any] = []

    def timed(equal: Any) -> Any:
        taken.extend(times(equal))
        return taken

    fastest(calls, expected, out, timed)
    return min(range(len(taken)), key=taken.__getitem__)


@wrong_step("impl.fused.products:fastest_of")
def algorithms_timed_before_they_are_compared(fastest: Step, calls: Any, expected: Any, out: Any, times: Any) -> int:
    """Every algorithm is timed before it is compared, one that the library refuses to run too."""
    times(calls)
    return int(fastest(calls, expected, out, times))


@wrong_step("impl.fused.layer:FusedLayer._mlp_backward")
def fused_gate_written_while_read(backward: Step, self: Any, *given: Any) -> Any:
    """The gradients of gate and up are written over them while the work beside the products may not have read them yet."""
    side, self._side = self._side, SimpleNamespace(finish=lambda: None)
    try:
        return backward(self, *given)
    finally:
        self._side = side


def _held(count: int) -> Step:
    """The program holds so many of the tensors that work beside the next products reads, until it is done."""

    def backward_of(backward: Step, self: Any, *given: Any) -> Any:
        side = self._shared.side
        side.later = lambda work, *read: type(side).later(side, work, *read[:count])
        try:
            return backward(self, *given)
        finally:
            del side.later

    return backward_of


wrong_steps(
    "impl.fused.linear:FusedLinear.backward",
    by=_held,
    fused_inputs_freed_early=("Nobody holds what the factors' gradients are computed from, beside the next products.", 0),
    fused_input_of_a_freed_early=("The gradient of a product's result is held, and not its input, which A's gradient is computed from.", 1),
)


# cards beside the current one, and what captured graphs keep

wrong_step("impl.kernels.launch:on_device", name="card_of_launches_is_the_current", doc="A kernel is launched on the current card.")(
    lambda *_: nullcontext()
)
wrong_step("impl.fused.step:on_device", name="card_of_captures_is_the_current", doc="A step is captured on the current card.")(
    lambda *_: nullcontext()
)


@wrong_step("impl.fused.cublaslt:_handle")
def card_of_handles_is_the_current(*_: Any) -> Any:
    """cuBLASLt's handles are made for the first card."""
    from blackswan.impl.fused import cublaslt

    with torch.cuda.device(torch.device("cuda", 0)):
        return cublaslt._made(cublaslt._library().cublasLtCreate)


@wrong_step("impl.fused.step:FusedTrainer._capture")
def graphs_have_pools_of_their_own(capture: Step, self: Any, *given: Any) -> Any:
    """The memory of every number of tokens lies beside that of the others."""
    self._pool = None
    return capture(self, *given)


def _ended_by_any_thread(begin: Step) -> Step:
    """A beginning of captures in torch's default mode."""
    return lambda *given, **options: begin(*given, **options | {"capture_error_mode": "global"})


@wrong_step("impl.fused.step:FusedTrainer._capture")
def captures_of_steps_end_by_any_thread(capture: Step, self: Any, *given: Any) -> Any:
    """What another thread does on a GPU meanwhile ends the capture of a step."""
    with mock.patch.object(torch.cuda, "graph", _ended_by_any_thread(torch.cuda.graph)):
        return capture(self, *given)


@wrong_step("impl.fused.products:_captured")
def captures_of_products_end_by_any_thread(captured: Step, *given: Any) -> Any:
    """What another thread does on a GPU meanwhile ends the capture of a product that is timed."""
    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", _ended_by_any_thread(torch.cuda.CUDAGraph.capture_begin)):
        return captured(*given)


def _without_waits_of(stream: Any) -> Any:
    """Inside the block that stream waits for no other one."""
    usual = torch.cuda.Stream.wait_stream

    def wait(self: Any, other: Any) -> None:
        if self is not stream:
            usual(self, other)

    return mock.patch.object(torch.cuda.Stream, "wait_stream", wait)


@wrong_step("impl.fused.step:FusedTrainer._capture")
def captures_begin_before_their_batch_is_there(capture: Step, self: Any, *given: Any) -> Any:
    """The stream that is captured warms up on a batch that the current one may not have packed yet."""
    from blackswan.impl.fused.side import captured_stream

    with _without_waits_of(captured_stream(self._masters.device)):
        return capture(self, *given)


@wrong_step("impl.fused.side:SideStream.run")
def work_beside_begins_at_once(run: Step, self: Any, *given: Any) -> Any:
    """Work beside the products does not wait for what it reads."""
    with _without_waits_of(self._stream):
        return run(self, *given)


@wrong_step("impl.fused.side:SideStream.run")
def work_beside_is_read_at_once(run: Step, self: Any, *given: Any) -> Any:
    """The result of work beside the products is read without a wait."""
    found = run(self, *given)

    def early() -> Any:
        with mock.patch.object(torch.cuda.Stream, "wait_event"):
            return found()

    return early


@wrong_step("impl.fused.model:FusedClassifier._forward")
def graphs_hold_activations(forward: Step, self: Any, *given: Any) -> Any:
    """Each number of tokens holds on to the activations of its captured pass."""
    found = forward(self, *given)
    self._held = [*getattr(self, "_held", ()), *found[1]]
    return found


def _kept_for(devices: int) -> Step:
    """A tensor that is kept for the device that asked last, or with none counted for that which asked first."""
    kept: dict[Any, Any] = {}

    def constant(right: Step, *given: Any) -> Any:
        key = given if devices else None
        if key not in kept:
            kept.clear()
            kept[key] = right(*given).clone()
        return kept[key]

    return constant


wrong_steps(
    "impl.kernels.nf4_dequantize:_codebook",
    by=_kept_for,
    codebook_of_the_last_device=("The codebook that a captured step reads is let go when another device asks for one.", 1),
    codebook_of_the_first_device=("Every card reads the codebook of the one that asked first.", 0),
)
wrong_steps(
    "impl.kernels.rope:_quarter_turns",
    by=_kept_for,
    angles_of_the_last_device=("The angles that a captured step reads are let go when another device asks for theirs.", 1),
)


_few_angles: dict[Any, Any] = {}


@wrong_step("impl.kernels.rope:_quarter_turns")
def angles_of_the_last_models(right: Step, *given: Any) -> Any:
    """The angles that a captured step reads are let go when eight other models have asked for theirs."""
    _few_angles[given] = _few_angles.pop(given, None)
    if _few_angles[given] is None:
        _few_angles[given] = right(*given).clone()
    for oldest in list(_few_angles)[:-8]:
        del _few_angles[oldest]
    return _few_angles[given]


@wrong_step("impl.fused.cublaslt:Product.__init__")
def workspace_address_alone_is_kept(init: Step, self: Any, *given: Any) -> None:
    """A tuned product keeps its workspace's address, and the memory goes to whoever asks next."""
    init(self, *given)
    address = self._workspace.data_ptr()
    self._workspace = SimpleNamespace(data_ptr=lambda: address)


wrong_step("impl.fused.layer:BUFFERS", name="fused_buffer_shared", doc="The next weight is dequantised over the one that a product reads.")(
    lambda _: (0, 0, 0, 0)
)


@wrong_step("impl.device:resolve_device")
def narrow_sums_on_auto(resolve: Step, name: str) -> Any:
    """Only a device that is named has sums in a narrow dtype switched off."""
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction
    found = resolve(name)
    if name == "auto":
        products.allow_bf16_reduced_precision_reduction = before
    return found


@wrong_step("impl.device:resolve_device")
def device_without_a_number(resolve: Step, name: str) -> Any:
    """A card that is named without a number is whichever is the current one."""
    found = resolve(name)
    return found if ":" in name else torch.device(found.type)


@wrong_step("impl.residency:require_residency")
def residency_names_the_last_device(require: Step, model: Any, optimiser: Any, device: Any) -> None:
    """The device that is named is that of the last tensor looked at, which is where it is to be."""
    from blackswan.impl.residency import NotResident

    try:
        require(model, optimiser, device)
    except NotResident as error:
        said = re.sub(r" is on [^,]+, not on (\S+)", r" is on \1, not on \1", str(error))
        raise NotResident(said) from None
