"""Wrong devices, ledgers, searches for what is not finite and transfers: one step of `impl` replaced each."""

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

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
wrong_step("impl.residency:_tensors", name="residency_without_optimiser", doc="Moments are not looked at.")(
    lambda tensors, *given: ((name, value) for name, value in tensors(*given) if not name.startswith("optimiser"))
)


def _unseen(beginning: str) -> Step:
    """Without the tensors whose names begin so."""
    return lambda tensors, *given: ((name, value) for name, value in tensors(*given) if not name.startswith(beginning))


wrong_steps(
    "impl.residency:_tensors",
    by=_unseen,
    residency_without_gradients=("Gradients are not looked at.", "the gradient"),
    residency_without_optimised=("A parameter that the optimiser moves, and not the model's, is not looked at.", "optimiser.parameters"),
)


@wrong_step("impl.residency:require_residency", "S26")
def residency_moves_in_silence(*_: Any) -> None:
    """No objection to a tensor elsewhere."""


# the ledger


@wrong_step("impl.ledger:Ledger._locked")
@contextmanager
def ledger_without_lock(locked: Step, self: Any) -> Iterator[None]:
    """Read and written without the lock."""
    with locked(self):
        pass
    yield


def _asking(changes: Callable[[Any, Any, Any], Mapping[str, Any]]) -> Step:
    """`Ledger._require` on other entries, memory or bytes: `changes` sees the entries, the memory and the bytes."""

    def wrong(require: Step, self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        asked = {"count": count, "others": others, "memory": memory or self._memory(device)}
        return require(self, device, *{**asked, **changes(others, asked["memory"], count)}.values())

    return wrong


wrong_steps(
    "impl.ledger:Ledger._require",
    by=_asking,
    ledger_capacity_hard_coded=(
        "24 GB whatever the card has.",
        lambda _, memory, __: {"memory": replace(memory, free=24 * 2**30, total=24 * 2**30)},
        "S23",
    ),
    ledger_counts_own_only=(
        "Reservations of other processes are not counted.",
        lambda others, *_: {"others": [entry for entry in others if entry.pid == os.getpid()]},
    ),
    ledger_ignores_free=(
        "What programs without a reservation take is not counted.",
        lambda _, memory, __: {"memory": replace(memory, free=memory.total)},
    ),
    ledger_refuses_what_just_fits=("A reservation of all that is left is refused.", lambda _, __, count: {"count": count + 1}),
    ledger_mixes_devices=(
        "What is reserved of one card counts against every card.",
        lambda others, memory, _: {"others": [replace(entry, device=memory.key) for entry in others]},
    ),
)


def _growing(update: Step, self: Any, entry: Any, device: Any, count: int, own: int) -> Any:
    """`Ledger.update` where that many bytes of the reservation count as allocated."""
    memory = self._memory(device)
    seen = replace(memory, free=memory.free - min(memory.own, entry.bytes) + own)
    with patch.object(self, "_memory", lambda _: seen):
        return update(self, entry, device, count)


@wrong_step("impl.ledger:Ledger.update")
def ledger_counts_all_allocated_as_free(update: Step, self: Any, entry: Any, device: Any, count: int) -> Any:
    """All that the process holds, also beyond the reservation, counts as free to it when it grows."""
    return _growing(update, self, entry, device, count, self._memory(device).own)


@wrong_step("impl.ledger:Ledger.update")
def ledger_counts_allocated_twice(update: Step, self: Any, entry: Any, device: Any, count: int) -> Any:
    """Bytes that were allocated of a reservation are not free to it when it grows."""
    return _growing(update, self, entry, device, count, 0)


wrong_step("impl.ledger:Ledger._share", name="ledger_of_one_user", doc="Its files are their maker's alone where the umask says so.")(
    lambda *_: None
)
wrong_step("impl.ledger:Ledger._living", name="ledger_keeps_the_dead", doc="Entries of ended processes stay.")(lambda _, self: self._read())


@wrong_step("impl.ledger:Ledger._living")
def ledger_by_process_id_only(_: Step, self: Any) -> Any:
    """A later process of the same id inherits the entry."""
    from blackswan.impl.ledger import process_start

    return [entry for entry in self._read() if process_start(entry.pid) is not None]


wrong_step("impl.ledger:Ledger.update", name="ledger_update_forgotten", doc="A new size is not written.")(
    lambda _, _self, entry, _device, count: replace(entry, bytes=count)
)


@wrong_step("impl.ledger:Ledger.update")
def ledger_update_unchecked(_: Step, self: Any, entry: Any, _device: Any, count: int) -> Any:
    """A reservation grows whatever is left."""
    grown = replace(entry, bytes=count)
    with self._locked():
        self._write([*(other for other in self._living() if other.id != entry.id), grown])
    return grown


@wrong_step("impl.ledger:Ledger.release")
def ledger_release_forgotten(*_: Any) -> None:
    """A released reservation stays."""


@wrong_step("impl.ledger:Ledger.release")
def ledger_releases_all_of_a_process(_: Step, self: Any, entry: Any) -> None:
    """One release takes out all of the process."""
    with self._locked():
        self._write([other for other in self._living() if other.pid != entry.pid])


@wrong_step("impl.ledger:reserve")
@contextmanager
def memory_refused_after_allocation(reserve: Step, *given: Any) -> Iterator[None]:
    """The block runs, then the memory is asked for."""
    yield
    with reserve(*given):
        pass


@wrong_step("impl.ledger:Ledger.acquire")
def memory_refused_without_numbers(acquire: Step, *given: Any) -> Any:
    """The refusal says no bytes."""
    try:
        return acquire(*given)
    except RuntimeError as error:
        error.args = ("out of memory",)
        raise


@wrong_step("impl.ledger:InsufficientMemory.__init__")
def memory_of_others_called_available(init: Step, self: Any, device: str, needed: int, memory: Any, reserved: int, holders: str) -> None:
    """The refusal says what is free to be available, also where others have reserved it."""
    init(self, device, needed, memory, reserved, holders)
    said = f"{memory.free / 2**30:.2f} GiB available"
    self.args = (re.sub(r"[\d.]+ GiB available", said, str(self)),)


@wrong_step("impl.ledger:Reservation.__exit__")
def ledger_of_failed_blocks_stays(leave: Step, self: Any, kind: Any = None, *given: Any) -> None:
    """A block that fails keeps its reservation."""
    if kind is None:
        leave(self, kind, *given)


@wrong_step("impl.ledger:Ledger._write")
def ledger_written_in_place(_: Step, self: Any, entries: Any) -> None:
    """The file is written over, so that a killed process leaves a part of it."""
    path = self.folder / "ledger.json"
    with path.open("w") as file:
        self._share(file)
        json.dump([vars(entry) for entry in entries], file)


# what is not finite


wrong_step("impl.nonfinite:_bad", name="origin_of_nan_only", doc="Infinities pass.")(
    lambda _, value: value.is_floating_point() and bool(value.isnan().any())
)


@wrong_step("impl.nonfinite:torch.tensor_split")
def origin_of_the_first_part(split: Step, *given: Any) -> Any:
    """A parameter is searched in parts, and only the first part is looked at."""
    return split(*given)[:1]


wrong_step("impl.nonfinite:_own", name="origin_of_forward_only", doc="Gradients are not looked at.")(
    lambda _, _path, _operation, _name, value: value
)


@wrong_step("impl.nonfinite:_watched")
def origin_names_the_logits(_: Step, path: str, operation: str, function: Step, arguments: Mapping[str, Any]) -> Any:
    """Only the logits are looked at."""
    from blackswan.impl.nonfinite import _bad, _Found

    result = function(**arguments)
    if path == "score" and _bad(result):
        raise _Found(f"{path} ({operation}): not finite")
    return result


wrong_step("impl.nonfinite:torch.autograd.grad", name="origin_leaves_gradients", doc="Asking leaves gradients behind for the next step.")(
    lambda _, loss, inputs: loss.backward(inputs=inputs)
)
wrong_step("impl.optimiser:AdamW.flat_gradient", name="training_swallows_bad_gradients", doc="NaN gradients become zeros.")(
    lambda flat, self: torch.nan_to_num(flat(self), nan=0.0, posinf=0.0, neginf=0.0)
)


@wrong_step("impl.validation:require_finite_norm")
def training_steps_on_bad_gradients(*_: Any) -> None:
    """The norm is not looked at."""


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


@wrong_step("impl.fused.layer:FusedLayer._mlp_backward")
def fused_gate_written_while_read(backward: Step, self: Any, *given: Any) -> Any:
    """The gradients of gate and up are written over them while the work beside the products may not have read them yet."""
    side, self._side = self._side, SimpleNamespace(finish=lambda: None)
    try:
        return backward(self, *given)
    finally:
        self._side = side


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


wrong_steps(
    "impl.operations.attention:available_memory",
    free_memory_for_available=("Memory that holds cached files counts as taken.", lambda _: _said("MemFree")),
    memory_in_all_for_available=("Memory that others have taken counts as there.", lambda _: _said("MemTotal")),
)
wrong_steps(
    "impl.operations.attention:_require_room",
    memory_of_the_host_not_asked=("Attention takes what memory it can get.", lambda *_: None),
    memory_of_one_text=("Scores are counted for one text of a batch.", lambda room, q: room(q[:1])),
)
wrong_steps(
    "impl.ledger:FOLDER_VARIABLE", ledger_folder_of_nobody=("The variable that names the folder is passed over.", lambda _: "LEDGER")
)


def _said(name: str) -> float:
    from blackswan.impl import host

    lines = dict(line.split(":", 1) for line in host._MEMINFO.read_text().splitlines())
    return float(lines[name].split()[0]) * 1024 if name in lines else float("inf")


@wrong_step("impl.ledger:Ledger._read")
def ledger_damaged_for_ever(_: Step, self: Any) -> Any:
    """A ledger that is damaged stops every run."""
    import json

    from blackswan.impl.ledger import FILE, _entry

    path = self.folder / FILE
    return [_entry(value) for value in json.loads(path.read_bytes())] if path.is_file() else []


wrong_steps("impl.memory:_library_workspace", estimate_without_workspaces=("The workspaces of libraries are not counted.", lambda *_: 0))
wrong_steps("impl.memory:BLOCK", estimate_without_blocks=("Nothing is rounded up to the blocks of CUDA's allocator.", lambda _: 1))


@wrong_step("impl.commands.common:memory_of_a_step")
def memory_of_a_step_in_float32(right: Step, model: Any, config: Any, *given: Any) -> Any:
    """A run's memory is estimated in float32, whatever its dtype."""
    return right(model, replace(config, dtype="float32"), *given)


@wrong_step("impl.commands.common:memory_of_a_step")
def memory_of_a_step_of_any_length(right: Step, model: Any, config: Any, samples: int, _: int, device: Any) -> Any:
    """A run's memory is estimated for texts as long as they may be, and not as they are."""
    return right(model, config, samples, config.max_seq_len, device)


@wrong_step("impl.ledger:reserve")
def memory_of_the_first_card_alone(reserve: Step, device: Any, *given: Any) -> Any:
    """Nothing is reserved of another card than the first."""
    return nullcontext() if device.index else reserve(device, *given)
