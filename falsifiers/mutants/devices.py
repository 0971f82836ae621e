"""Wrong devices, ledgers, searches for what is not finite and transfers: one step of `impl` replaced each."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import named_step, step_mutant

Step = Callable[..., Any]
_resolve = partial(step_mutant, "blackswan.impl.device", "resolve_device")
_nonfinite = partial(step_mutant, "blackswan.impl.nonfinite")
_ledger = partial(step_mutant, "blackswan.impl.ledger")


def _nothing(_: Step) -> Step:
    return lambda *_arguments, **_options: None


named_step("auto_falls_back_in_silence", "S26", "No warning when auto takes the CPU.", _nothing, "blackswan.impl.device", "warnings.warn")


@_resolve("own")
def auto_warns_of_every_device(resolve: Step) -> Step:
    """A warning for devices that were named as well."""

    def changed(name: str) -> Any:
        found = resolve(name)
        if name != "auto":
            warnings.warn(f"using {found}", stacklevel=2)
        return found

    return changed


@_resolve("S26")
def device_explicit_falls_back(resolve: Step) -> Step:
    """The CPU or another card instead of one that is not there."""

    def changed(name: str) -> Any:
        try:
            return resolve(name)
        except RuntimeError:
            return resolve("auto")

    return changed


@_resolve("own")
def device_index_dropped(resolve: Step) -> Step:
    """The first card whatever the index."""
    return lambda name: torch.device(found.type, 0) if (found := resolve(name)).type == "cuda" else found


# proof of residency


def _residency_of(wanted: Callable[[str], bool], name: str, doc: str) -> None:
    def change(tensors: Step) -> Step:
        return lambda *arguments: ((key, value) for key, value in tensors(*arguments) if wanted(key))

    named_step(name, "own", doc, change, "blackswan.impl.residency", "_tensors")


_residency_of(
    lambda name: not any(part in name for part in ("lora_", "score", "optimiser")),
    "residency_of_trained_only",
    "LoRA, head and optimiser are not looked at.",
)
_residency_of(lambda name: "quantized" not in name, "residency_without_buffers", "NF4 codes and absmax are not looked at.")
_residency_of(lambda name: not name.startswith("optimiser"), "residency_without_optimiser", "Moments are not looked at.")
named_step(
    "residency_moves_in_silence", "S26", "No objection to a tensor elsewhere.", _nothing, "blackswan.impl.residency", "require_residency"
)


# the ledger


@_ledger("Ledger._locked", "own")
def ledger_without_lock(locked: Step) -> Step:
    """Read and written without the lock."""

    @contextmanager
    def changed(self: Any) -> Iterator[None]:
        with locked(self):
            pass
        yield

    return changed


def _asked(name: str, pedigree: str, doc: str, change: Callable[[int, Any, Any], tuple[int, Any, Any]]) -> None:
    """A ledger that asks whether other bytes, beside other entries, fit into another memory."""

    def make(require: Step) -> Step:
        def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
            return require(self, device, *change(count, others, memory or self._memory(device)))

        return changed

    named_step(name, pedigree, doc, make, "blackswan.impl.ledger", "Ledger._require")


_asked(
    "ledger_capacity_hard_coded",
    "S23",
    "24 GB whatever the card has.",
    lambda count, others, memory: (count, others, replace(memory, free=24 * 2**30, total=24 * 2**30)),
)
_asked(
    "ledger_counts_own_only",
    "own",
    "Reservations of other processes are not counted.",
    lambda count, others, memory: (count, [entry for entry in others if entry.pid == os.getpid()], memory),
)
_asked(
    "ledger_ignores_free",
    "own",
    "What programs without a reservation take is not counted.",
    lambda count, others, memory: (count, others, replace(memory, free=memory.total)),
)
_asked(
    "ledger_refuses_what_just_fits",
    "own",
    "A reservation of all that is left is refused.",
    lambda count, others, memory: (count + 1, others, memory),
)
_asked(
    "ledger_mixes_devices",
    "own",
    "What is reserved of one card counts against every card.",
    lambda count, others, memory: (count, [replace(entry, device=memory.key) for entry in others], memory),
)


def _growing(name: str, doc: str, own: Callable[[Any, Any], int]) -> None:
    """What counts as allocated of a reservation that grows, from what the device reports and the reservation."""

    def change(update: Step) -> Step:
        def changed(self: Any, entry: Any, device: Any, count: int) -> Any:
            memory = self._memory(device)
            seen = replace(memory, free=memory.free - min(memory.own, entry.bytes) + own(memory, entry))
            with patch.object(self, "_memory", lambda _: seen):
                return update(self, entry, device, count)

        return changed

    named_step(name, "own", doc, change, "blackswan.impl.ledger", "Ledger.update")


_growing(
    "ledger_counts_all_allocated_as_free",
    "All that the process holds, also beyond the reservation, counts as free to it when it grows.",
    lambda memory, _: memory.own,
)
_growing("ledger_counts_allocated_twice", "What was allocated of a reservation is not free to it when it grows.", lambda *_: 0)


@_ledger("Ledger._living", "own")
def ledger_keeps_the_dead(_: Step) -> Step:
    """Entries of ended processes stay."""
    return lambda self: self._read()


@_ledger("Ledger._living", "own")
def ledger_by_process_id_only(_: Step) -> Step:
    """A later process of the same id inherits the entry."""
    from blackswan.impl.ledger import process_start

    return lambda self: [entry for entry in self._read() if process_start(entry.pid) is not None]


@_ledger("Ledger.update", "own")
def ledger_update_forgotten(_: Step) -> Step:
    """A new size is not written."""
    return lambda _self, entry, _device, count: replace(entry, bytes=count)


@_ledger("Ledger.update", "own")
def ledger_update_unchecked(_: Step) -> Step:
    """A reservation grows whatever is left."""

    def changed(self: Any, entry: Any, _device: Any, count: int) -> Any:
        with self._locked():
            grown = replace(entry, bytes=count)
            self._write([*(other for other in self._living() if other.id != entry.id), grown])
        return grown

    return changed


named_step("ledger_release_forgotten", "own", "A released reservation stays.", _nothing, "blackswan.impl.ledger", "Ledger.release")


@_ledger("Ledger.release", "own")
def ledger_releases_all_of_a_process(_: Step) -> Step:
    """One release takes out all of the process."""

    def changed(self: Any, entry: Any) -> None:
        with self._locked():
            self._write([other for other in self._living() if other.pid != entry.pid])

    return changed


@_ledger("reserve", "own")
def memory_refused_after_allocation(reserve: Step) -> Step:
    """The block runs, then the memory is asked for."""

    @contextmanager
    def changed(*arguments: Any) -> Iterator[None]:
        yield
        with reserve(*arguments):
            pass

    return changed


@_ledger("Ledger.acquire", "own")
def memory_refused_without_numbers(acquire: Step) -> Step:
    """The refusal says no bytes."""

    def changed(self: Any, device: Any, count: int) -> Any:
        try:
            return acquire(self, device, count)
        except RuntimeError as error:
            error.args = ("out of memory",)
            raise

    return changed


# what is not finite


@_nonfinite("_bad", "own")
def origin_of_nan_only(_: Step) -> Step:
    """Infinities pass."""
    return lambda value: value.is_floating_point() and bool(value.isnan().any())


@_nonfinite("torch.tensor_split", "own")
def origin_of_the_first_part(split: Step) -> Step:
    """Of a parameter that is searched in parts the first alone."""
    return lambda value, count: split(value, count)[:1]


@_nonfinite("_own", "own")
def origin_of_forward_only(_: Step) -> Step:
    """Gradients are not looked at."""
    return lambda _path, _operation, _name, value: value


@_nonfinite("_watched", "own")
def origin_names_the_logits(_: Step) -> Step:
    """Only the logits are looked at."""
    from blackswan.impl.nonfinite import _bad, _Found

    def changed(path: str, operation: str, function: Step, arguments: Any) -> Any:
        result = function(**arguments)
        if path == "score" and _bad(result):
            raise _Found(f"{path} ({operation}): not finite")
        return result

    return changed


@_nonfinite("torch.autograd.grad", "own")
def origin_leaves_gradients(_: Step) -> Step:
    """Asking leaves gradients behind for the next step."""
    return lambda loss, inputs: loss.backward(inputs=inputs)


@step_mutant("blackswan.impl.optimiser", "AdamW.flat_gradient", "own")
def training_swallows_bad_gradients(flat: Step) -> Step:
    """NaN gradients become zeros."""
    return lambda self: torch.nan_to_num(flat(self), nan=0.0, posinf=0.0, neginf=0.0)


named_step(
    "training_steps_on_bad_gradients", "own", "The norm is not looked at.", _nothing, "blackswan.impl.validation", "require_finite_norm"
)


# to the device and back


@step_mutant("blackswan.impl.optimiser", "AdamW.state", "own")
def sync_lora_rounded(state: Step) -> Step:
    """LoRA comes back rounded to bfloat16."""
    return lambda self: {
        name: value.bfloat16().to(value.dtype) if name.startswith("trainable/") else value for name, value in state(self).items()
    }


@step_mutant("blackswan.impl.decoder", "Layer", "S29")
def sync_layers_swapped(layer: Step) -> Step:
    """Output projections of two layers change places at upload."""

    def changed(config: Any, path: str, tensors: Any, nf4: bool) -> Any:
        made = layer(config, path, tensors, nf4)
        other = f"model.layers.{config.layers - 1 - int(path.rpartition('.')[2])}"
        made.self_attn.o_proj.weight = torch.nn.Parameter(tensors[f"{other}.self_attn.o_proj.weight"], requires_grad=False)
        return made

    return changed


@step_mutant("blackswan.impl.classifier", "Head.__init__", "own")
def sync_head_bias_dropped(init: Step) -> Step:
    """The head's bias starts at zero."""
    return lambda self, weight, bias: init(self, weight, torch.zeros_like(bias))
