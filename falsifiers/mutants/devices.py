"""Wrong devices, ledgers, estimates, loaders and searches for what is not finite: one step of `impl` replaced each."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import named_step, step_mutant

Step = Callable[..., Any]
LEDGER = "blackswan.impl.ledger"

named_step(
    "auto_falls_back_in_silence",
    "S26",
    "No warning when auto takes the CPU.",
    lambda _: lambda *_arguments, **_options: None,
    "blackswan.impl.device",
    "warnings.warn",
)


@step_mutant("blackswan.impl.device", "resolve_device", "own")
def auto_warns_of_every_device(resolve: Step) -> Step:
    """A warning for devices that were named as well."""

    def changed(name: str) -> Any:
        found = resolve(name)
        if name != "auto":
            import warnings

            warnings.warn(f"using {found}", stacklevel=2)
        return found

    return changed


@step_mutant("blackswan.impl.device", "resolve_device", "S26")
def device_explicit_falls_back(resolve: Step) -> Step:
    """The CPU or another card instead of one that is not there."""

    def changed(name: str) -> Any:
        try:
            return resolve(name)
        except RuntimeError:
            return resolve("auto")

    return changed


@step_mutant("blackswan.impl.device", "resolve_device", "own")
def device_index_dropped(resolve: Step) -> Step:
    """The first card whatever the index."""

    def changed(name: str) -> Any:
        found = resolve(name)
        return torch.device(found.type, 0) if found.type == "cuda" else found

    return changed


def _residency_without(unwanted: Callable[[str], bool]) -> Callable[[Step], Step]:
    return lambda tensors: lambda *arguments: ((name, value) for name, value in tensors(*arguments) if not unwanted(name))


named_step(
    "residency_of_trained_only",
    "own",
    "LoRA, head and optimiser are not looked at.",
    _residency_without(lambda name: "lora_" not in name and "score" not in name and "optimiser" not in name),
    "blackswan.impl.residency",
    "_tensors",
)
named_step(
    "residency_without_buffers",
    "own",
    "NF4 codes and absmax are not looked at.",
    _residency_without(lambda name: "quantized" in name),
    "blackswan.impl.residency",
    "_tensors",
)
named_step(
    "residency_without_optimiser",
    "own",
    "Moments are not looked at.",
    _residency_without(lambda name: name.startswith("optimiser")),
    "blackswan.impl.residency",
    "_tensors",
)


@step_mutant("blackswan.impl.residency", "require_residency", "S26")
def residency_moves_in_silence(_: Step) -> Step:
    """No objection to a tensor elsewhere."""
    return lambda *_arguments: None


# the ledger


@step_mutant(LEDGER, "Ledger._locked", "own")
def ledger_without_lock(locked: Step) -> Step:
    """Read and written without the lock."""

    @contextmanager
    def changed(self: Any) -> Iterator[None]:
        with locked(self):
            pass
        yield

    return changed


@step_mutant(LEDGER, "Ledger._require", "S23")
def ledger_capacity_hard_coded(require: Step) -> Step:
    """24 GB whatever the card has."""

    def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        return require(self, device, count, others, replace(memory or self._memory(device), free=24 * 2**30, total=24 * 2**30))

    return changed


@step_mutant(LEDGER, "Ledger._require", "own")
def ledger_counts_own_only(require: Step) -> Step:
    """Reservations of other processes are not counted."""

    def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        return require(self, device, count, [entry for entry in others if entry.pid == os.getpid()], memory)

    return changed


@step_mutant(LEDGER, "Ledger._require", "own")
def ledger_ignores_free(require: Step) -> Step:
    """What programs without a reservation take is not counted."""

    def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        memory = memory or self._memory(device)
        return require(self, device, count, others, replace(memory, free=memory.total))

    return changed


@step_mutant(LEDGER, "Ledger._require", "own")
def ledger_refuses_what_just_fits(require: Step) -> Step:
    """A reservation of all that is left is refused."""

    def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        return require(self, device, count + 1, others, memory)

    return changed


@step_mutant(LEDGER, "Ledger._require", "own")
def ledger_mixes_devices(require: Step) -> Step:
    """What is reserved of one card counts against every card."""

    def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        key = self._memory(device).key
        return require(self, device, count, [replace(entry, device=key) for entry in others], memory)

    return changed


def _growing(own: Callable[[Any, Any], int]) -> Callable[[Step], Step]:
    """What counts as allocated of a reservation that grows, from what the device reports and the reservation."""

    def mutant(update: Step) -> Step:
        def changed(self: Any, entry: Any, device: Any, count: int) -> Any:
            memory = self._memory(device)
            with patch.object(
                self, "_memory", lambda _: replace(memory, free=memory.free - min(memory.own, entry.bytes) + own(memory, entry))
            ):
                return update(self, entry, device, count)

        return changed

    return mutant


named_step(
    "ledger_counts_all_allocated_as_free",
    "own",
    "All that the process holds, also beyond the reservation, counts as free to it when it grows.",
    _growing(lambda memory, _: memory.own),
    LEDGER,
    "Ledger.update",
)
named_step(
    "ledger_counts_allocated_twice",
    "own",
    "What was allocated of a reservation is not free to it when it grows.",
    _growing(lambda *_: 0),
    LEDGER,
    "Ledger.update",
)
named_step(
    "ledger_keeps_the_dead", "own", "Entries of ended processes stay.", lambda _: lambda self: self._read(), LEDGER, "Ledger._living"
)


@step_mutant(LEDGER, "Ledger._living", "own")
def ledger_by_process_id_only(_: Step) -> Step:
    """A later process of the same id inherits the entry."""
    from blackswan.impl.ledger import process_start

    return lambda self: [entry for entry in self._read() if process_start(entry.pid) is not None]


named_step(
    "ledger_update_forgotten",
    "own",
    "A new size is not written.",
    lambda _: lambda _self, entry, _device, count: replace(entry, bytes=count),
    LEDGER,
    "Ledger.update",
)


@step_mutant(LEDGER, "Ledger.update", "own")
def ledger_update_unchecked(_: Step) -> Step:
    """A reservation grows whatever is left."""

    def changed(self: Any, entry: Any, _device: Any, count: int) -> Any:
        with self._locked():
            grown = replace(entry, bytes=count)
            self._write([*(other for other in self._living() if other.id != entry.id), grown])
        return grown

    return changed


named_step("ledger_release_forgotten", "own", "A released reservation stays.", lambda _: lambda *_arguments: None, LEDGER, "Ledger.release")


@step_mutant(LEDGER, "Ledger.release", "own")
def ledger_releases_all_of_a_process(_: Step) -> Step:
    """One release takes out all of the process."""

    def changed(self: Any, entry: Any) -> None:
        with self._locked():
            self._write([other for other in self._living() if other.pid != entry.pid])

    return changed


@step_mutant(LEDGER, "reserve", "own")
def memory_refused_after_allocation(reserve: Step) -> Step:
    """The block runs, then the memory is asked for."""

    @contextmanager
    def changed(*arguments: Any) -> Iterator[None]:
        yield
        with reserve(*arguments):
            pass

    return changed


@step_mutant(LEDGER, "Ledger.acquire", "own")
def memory_refused_without_numbers(acquire: Step) -> Step:
    """The refusal says no bytes."""

    def changed(self: Any, device: Any, count: int) -> Any:
        from blackswan.impl.ledger import InsufficientMemory

        try:
            return acquire(self, device, count)
        except InsufficientMemory as error:
            error.args = ("out of memory",)
            raise

    return changed


# the estimate


def _estimate(change: Callable[[dict[str, int], int], tuple[dict[str, int], int]]) -> Callable[[Step], Step]:
    """An estimate with other parts and total."""

    def make(estimate: Step) -> Step:
        def changed(*arguments: Any, **options: Any) -> Any:
            found = estimate(*arguments, **options)
            parts, total = change(dict(found.parts), found.total)
            return replace(found, parts=parts, total=total)

        return changed

    return make


def _without(*names: str) -> Callable[[dict[str, int], int], tuple[dict[str, int], int]]:
    def change(parts: dict[str, int], total: int) -> tuple[dict[str, int], int]:
        left = {name: count for name, count in parts.items() if name not in names}
        return left, total - sum(count for name, count in parts.items() if name in names)

    return change


named_step(
    "estimate_without_scales", "S30", "NF4 without its absmax.", _estimate(_without("nf4_absmax")), "blackswan.impl.memory", "estimate"
)
named_step(
    "estimate_without_lora", "S30", "LoRA and head left out.", _estimate(_without("lora", "head")), "blackswan.impl.memory", "estimate"
)
named_step(
    "estimate_without_optimiser",
    "S30",
    "Moments, gradients and their temporaries left out.",
    _estimate(_without("moments", "gradients", "update")),
    "blackswan.impl.memory",
    "estimate",
)
named_step(
    "estimate_without_activations",
    "own",
    "What is saved for the backward pass left out.",
    _estimate(_without("activations", "working")),
    "blackswan.impl.memory",
    "estimate",
)


def _dequantised_as_activations(parts: dict[str, int], total: int) -> tuple[dict[str, int], int]:
    moved = parts.pop("dequantised_weights", 0)
    return parts | {"activations": parts["activations"] + moved}, total


named_step(
    "estimate_calls_weights_activations",
    "own",
    "Dequantised weights counted as saved activations.",
    _estimate(_dequantised_as_activations),
    "blackswan.impl.memory",
    "estimate",
)


def _estimate_of_other(change: Callable[[dict[str, Any]], None]) -> Callable[[Step], Step]:
    """An estimate of another training step than the one asked for."""

    def make(estimate: Step) -> Step:
        signature = inspect.signature(estimate)

        def changed(*arguments: Any, **options: Any) -> Any:
            bound = signature.bind(*arguments, **options)
            change(bound.arguments)
            return estimate(*bound.args, **bound.kwargs)

        return changed

    return make


named_step(
    "estimate_of_one_sample",
    "own",
    "A batch of one, whatever the batch.",
    _estimate_of_other(lambda given: given.update(batch=1)),
    "blackswan.impl.memory",
    "estimate",
)
named_step(
    "estimate_always_in_bfloat16",
    "own",
    "bfloat16 whatever the dtype.",
    _estimate_of_other(lambda given: given.update(dtype=torch.bfloat16)),
    "blackswan.impl.memory",
    "estimate",
)
named_step(
    "estimate_always_quantised",
    "own",
    "NF4 whether or not it was asked for.",
    _estimate_of_other(lambda given: given.update(adaptation=replace(given["adaptation"], nf4=True))),
    "blackswan.impl.memory",
    "estimate",
)


# loading with NF4


@step_mutant("blackswan.impl.classifier", "Converted", "own")
def load_all_before_quantising(converted: Step) -> Step:
    """Every tensor converted before the first is quantised."""

    def changed(*arguments: Any, **options: Any) -> Any:
        return dict(converted(*arguments, **options))

    return changed


@step_mutant("blackswan.impl.checkpoint", "load_checkpoint", "own")
def load_reads_all_shards(load: Step) -> Step:
    """All shards read before the model is built."""

    def changed(folder: Any) -> Any:
        found = load(folder)
        return replace(found, tensors=dict(found.tensors))

    return changed


@step_mutant("blackswan.impl.classifier", "Body", "S27")
def load_unquantised_with_warning(body: Step) -> Step:
    """NF4 asked for, a warning, and the run goes on unquantised."""

    def changed(config: Any, tensors: Any, nf4: bool) -> Any:
        import warnings

        if nf4:
            warnings.warn("NF4 is not available: going on without", stacklevel=2)
        return body(config, tensors, False)

    return changed


@step_mutant("blackswan.impl.decoder", "Layer", "own")
def load_last_layer_unquantised(layer: Step) -> Step:
    """The last layer is left as it is."""
    return lambda config, path, tensors, nf4: layer(config, path, tensors, nf4 and not path.endswith(f".{config.layers - 1}"))


# what is not finite


@step_mutant("blackswan.impl.nonfinite", "_bad", "own")
def origin_of_nan_only(_: Step) -> Step:
    """Infinities pass."""
    return lambda value: value.is_floating_point() and bool(value.isnan().any())


@step_mutant("blackswan.impl.nonfinite", "torch.tensor_split", "own")
def origin_of_the_first_part(split: Step) -> Step:
    """Of a parameter that is searched in parts the first alone."""
    return lambda value, count: split(value, count)[:1]


named_step(
    "origin_of_forward_only",
    "own",
    "Gradients are not looked at.",
    lambda _: lambda _path, _operation, _name, value: value,
    "blackswan.impl.nonfinite",
    "_own",
)


@step_mutant("blackswan.impl.nonfinite", "_watched", "own")
def origin_names_the_logits(_: Step) -> Step:
    """Only the logits are looked at.

    What a check of the logits alone can say.
    """
    from blackswan.impl.nonfinite import _bad, _Found

    def changed(path: str, operation: str, function: Step, arguments: Any) -> Any:
        result = function(**arguments)
        if path == "score" and _bad(result):
            raise _Found(f"{path} ({operation}): not finite")
        return result

    return changed


@step_mutant("blackswan.impl.nonfinite", "torch.autograd.grad", "own")
def origin_leaves_gradients(_: Step) -> Step:
    """Asking leaves gradients behind for the next step."""
    return lambda loss, inputs: loss.backward(inputs=inputs)


@step_mutant("blackswan.impl.optimiser", "AdamW.flat_gradient", "own")
def training_swallows_bad_gradients(flat: Step) -> Step:
    """NaN gradients become zeros."""
    return lambda self: torch.nan_to_num(flat(self), nan=0.0, posinf=0.0, neginf=0.0)


@step_mutant("blackswan.impl.validation", "require_finite_norm", "own")
def training_steps_on_bad_gradients(_: Step) -> Step:
    """The norm is not looked at."""
    return lambda *_arguments: None


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

    def changed(self: Any, weight: Any, bias: Any) -> None:
        init(self, weight, torch.zeros_like(bias))

    return changed
