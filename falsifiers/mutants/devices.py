"""Wrong devices, ledgers, searches for what is not finite and transfers: one step of `impl` replaced each."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import wrong_step

Step = Callable[..., Any]
_resolve = partial(wrong_step, "blackswan.impl.device", "resolve_device")
_residency = partial(wrong_step, "blackswan.impl.residency", "_tensors", "own")
_ledger = partial(wrong_step, "blackswan.impl.ledger")
_required = partial(wrong_step, "blackswan.impl.ledger", "Ledger._require")
_nonfinite = partial(wrong_step, "blackswan.impl.nonfinite")


@wrong_step("blackswan.impl.device", "warnings.warn", "S26")
def auto_falls_back_in_silence(*_: Any, **_options: Any) -> None:
    """No warning when auto takes the CPU."""


@_resolve("own")
def auto_warns_of_every_device(resolve: Step, name: str) -> Any:
    """A warning for devices that were named as well."""
    found = resolve(name)
    if name != "auto":
        warnings.warn(f"using {found}", stacklevel=2)
    return found


@_resolve("S26")
def device_explicit_falls_back(resolve: Step, name: str) -> Any:
    """The CPU or another card instead of one that is not there."""
    try:
        return resolve(name)
    except RuntimeError:
        return resolve("auto")


@_resolve("own")
def device_index_dropped(resolve: Step, name: str) -> Any:
    """The first card whatever the index."""
    found = resolve(name)
    return torch.device("cuda", 0) if found.type == "cuda" else found


# proof of residency


@_residency()
def residency_of_trained_only(tensors: Step, *given: Any) -> Any:
    """LoRA, head and optimiser are not looked at."""
    return ((name, value) for name, value in tensors(*given) if not any(part in name for part in ("lora_", "score", "optimiser")))


@_residency()
def residency_without_buffers(tensors: Step, *given: Any) -> Any:
    """NF4 codes and absmax are not looked at."""
    return ((name, value) for name, value in tensors(*given) if "quantized" not in name)


@_residency()
def residency_without_optimiser(tensors: Step, *given: Any) -> Any:
    """Moments are not looked at."""
    return ((name, value) for name, value in tensors(*given) if not name.startswith("optimiser"))


@wrong_step("blackswan.impl.residency", "require_residency", "S26")
def residency_moves_in_silence(*_: Any) -> None:
    """No objection to a tensor elsewhere."""


# the ledger


@_ledger("Ledger._locked", "own")
@contextmanager
def ledger_without_lock(locked: Step, self: Any) -> Iterator[None]:
    """Read and written without the lock."""
    with locked(self):
        pass
    yield


@_required("S23")
def ledger_capacity_hard_coded(require: Step, self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
    """24 GB whatever the card has."""
    return require(self, device, count, others, replace(memory or self._memory(device), free=24 * 2**30, total=24 * 2**30))


@_required("own")
def ledger_counts_own_only(require: Step, self: Any, device: Any, count: int, others: Any, *memory: Any) -> Any:
    """Reservations of other processes are not counted."""
    return require(self, device, count, [entry for entry in others if entry.pid == os.getpid()], *memory)


@_required("own")
def ledger_ignores_free(require: Step, self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
    """What programs without a reservation take is not counted."""
    memory = memory or self._memory(device)
    return require(self, device, count, others, replace(memory, free=memory.total))


@_required("own")
def ledger_refuses_what_just_fits(require: Step, self: Any, device: Any, count: int, *given: Any) -> Any:
    """A reservation of all that is left is refused."""
    return require(self, device, count + 1, *given)


@_required("own")
def ledger_mixes_devices(require: Step, self: Any, device: Any, count: int, others: Any, *memory: Any) -> Any:
    """What is reserved of one card counts against every card."""
    key = self._memory(device).key
    return require(self, device, count, [replace(entry, device=key) for entry in others], *memory)


def _growing(update: Step, self: Any, entry: Any, device: Any, count: int, own: int) -> Any:
    """`Ledger.update` where that many bytes of the reservation count as allocated."""
    memory = self._memory(device)
    seen = replace(memory, free=memory.free - min(memory.own, entry.bytes) + own)
    with patch.object(self, "_memory", lambda _: seen):
        return update(self, entry, device, count)


@_ledger("Ledger.update", "own")
def ledger_counts_all_allocated_as_free(update: Step, self: Any, entry: Any, device: Any, count: int) -> Any:
    """All that the process holds, also beyond the reservation, counts as free to it when it grows."""
    return _growing(update, self, entry, device, count, self._memory(device).own)


@_ledger("Ledger.update", "own")
def ledger_counts_allocated_twice(update: Step, self: Any, entry: Any, device: Any, count: int) -> Any:
    """What was allocated of a reservation is not free to it when it grows."""
    return _growing(update, self, entry, device, count, 0)


@_ledger("Ledger._living", "own")
def ledger_keeps_the_dead(_: Step, self: Any) -> Any:
    """Entries of ended processes stay."""
    return self._read()


@_ledger("Ledger._living", "own")
def ledger_by_process_id_only(_: Step, self: Any) -> Any:
    """A later process of the same id inherits the entry."""
    from blackswan.impl.ledger import process_start

    return [entry for entry in self._read() if process_start(entry.pid) is not None]


@_ledger("Ledger.update", "own")
def ledger_update_forgotten(_: Step, _self: Any, entry: Any, _device: Any, count: int) -> Any:
    """A new size is not written."""
    return replace(entry, bytes=count)


@_ledger("Ledger.update", "own")
def ledger_update_unchecked(_: Step, self: Any, entry: Any, _device: Any, count: int) -> Any:
    """A reservation grows whatever is left."""
    grown = replace(entry, bytes=count)
    with self._locked():
        self._write([*(other for other in self._living() if other.id != entry.id), grown])
    return grown


@_ledger("Ledger.release", "own")
def ledger_release_forgotten(*_: Any) -> None:
    """A released reservation stays."""


@_ledger("Ledger.release", "own")
def ledger_releases_all_of_a_process(_: Step, self: Any, entry: Any) -> None:
    """One release takes out all of the process."""
    with self._locked():
        self._write([other for other in self._living() if other.pid != entry.pid])


@_ledger("reserve", "own")
@contextmanager
def memory_refused_after_allocation(reserve: Step, *given: Any) -> Iterator[None]:
    """The block runs, then the memory is asked for."""
    yield
    with reserve(*given):
        pass


@_ledger("Ledger.acquire", "own")
def memory_refused_without_numbers(acquire: Step, *given: Any) -> Any:
    """The refusal says no bytes."""
    try:
        return acquire(*given)
    except RuntimeError as error:
        error.args = ("out of memory",)
        raise


# what is not finite


@_nonfinite("_bad", "own")
def origin_of_nan_only(_: Step, value: Any) -> bool:
    """Infinities pass."""
    return value.is_floating_point() and bool(value.isnan().any())


@_nonfinite("torch.tensor_split", "own")
def origin_of_the_first_part(split: Step, *given: Any) -> Any:
    """Of a parameter that is searched in parts the first alone."""
    return split(*given)[:1]


@_nonfinite("_own", "own")
def origin_of_forward_only(_: Step, _path: str, _operation: str, _name: str, value: Any) -> Any:
    """Gradients are not looked at."""
    return value


@_nonfinite("_watched", "own")
def origin_names_the_logits(_: Step, path: str, operation: str, function: Step, arguments: Mapping[str, Any]) -> Any:
    """Only the logits are looked at."""
    from blackswan.impl.nonfinite import _bad, _Found

    result = function(**arguments)
    if path == "score" and _bad(result):
        raise _Found(f"{path} ({operation}): not finite")
    return result


@_nonfinite("torch.autograd.grad", "own")
def origin_leaves_gradients(_: Step, loss: Any, inputs: Any) -> None:
    """Asking leaves gradients behind for the next step."""
    loss.backward(inputs=inputs)


@wrong_step("blackswan.impl.optimiser", "AdamW.flat_gradient", "own")
def training_swallows_bad_gradients(flat: Step, self: Any) -> Any:
    """NaN gradients become zeros."""
    return torch.nan_to_num(flat(self), nan=0.0, posinf=0.0, neginf=0.0)


@wrong_step("blackswan.impl.validation", "require_finite_norm", "own")
def training_steps_on_bad_gradients(*_: Any) -> None:
    """The norm is not looked at."""


# to the device and back


@wrong_step("blackswan.impl.optimiser", "AdamW.state", "own")
def sync_lora_rounded(state: Step, self: Any) -> Any:
    """LoRA comes back rounded to bfloat16."""
    return {name: value.bfloat16().to(value.dtype) if name.startswith("trainable/") else value for name, value in state(self).items()}


@wrong_step("blackswan.impl.decoder", "Layer", "S29")
def sync_layers_swapped(layer: Step, config: Any, path: str, tensors: Any, nf4: bool) -> Any:
    """Output projections of two layers change places at upload."""
    made = layer(config, path, tensors, nf4)
    other = f"model.layers.{config.layers - 1 - int(path.rpartition('.')[2])}"
    made.self_attn.o_proj.weight = torch.nn.Parameter(tensors[f"{other}.self_attn.o_proj.weight"], requires_grad=False)
    return made


@wrong_step("blackswan.impl.classifier", "Head.__init__", "own")
def sync_head_bias_dropped(init: Step, self: Any, weight: Any, bias: Any) -> None:
    """The head's bias starts at zero."""
    init(self, weight, torch.zeros_like(bias))
