"""Wrong devices, ledgers, estimates, loaders and searches for what is not finite: one step of `impl` replaced each."""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.patches import step_mutant

Step = Callable[..., Any]
LEDGER = "blackswan.impl.ledger"

step_mutant("auto_falls_back_in_silence", "blackswan.impl.device", "warnings.warn")(lambda _: lambda *_arguments, **_options: None)


@step_mutant("auto_warns_of_every_device", "blackswan.impl.device", "resolve_device")
def _(resolve: Step) -> Step:
    def changed(name: str) -> Any:
        found = resolve(name)
        if name != "auto":
            import warnings

            warnings.warn(f"using {found}", stacklevel=2)
        return found

    return changed


@step_mutant("device_explicit_falls_back", "blackswan.impl.device", "resolve_device")
def _(resolve: Step) -> Step:
    def changed(name: str) -> Any:
        try:
            return resolve(name)
        except RuntimeError:
            return resolve("auto")

    return changed


@step_mutant("device_index_dropped", "blackswan.impl.device", "resolve_device")
def _(resolve: Step) -> Step:
    def changed(name: str) -> Any:
        found = resolve(name)
        return torch.device(found.type, 0) if found.type == "cuda" else found

    return changed


def _residency_without(unwanted: Callable[[str], bool]) -> Callable[[Step], Step]:
    return lambda tensors: lambda *arguments: ((name, value) for name, value in tensors(*arguments) if not unwanted(name))


step_mutant("residency_of_trained_only", "blackswan.impl.residency", "_tensors")(
    _residency_without(lambda name: "lora_" not in name and "score" not in name and "optimiser" not in name)
)
step_mutant("residency_without_buffers", "blackswan.impl.residency", "_tensors")(_residency_without(lambda name: "quantized" in name))
step_mutant("residency_without_optimiser", "blackswan.impl.residency", "_tensors")(
    _residency_without(lambda name: name.startswith("optimiser"))
)


@step_mutant("residency_moves_in_silence", "blackswan.impl.residency", "require_residency")
def _(_: Step) -> Step:
    return lambda *_arguments: None


# the ledger


@step_mutant("ledger_without_lock", LEDGER, "Ledger._locked")
def _(locked: Step) -> Step:
    @contextmanager
    def changed(self: Any) -> Iterator[None]:
        with locked(self):
            pass
        yield

    return changed


@step_mutant("ledger_capacity_hard_coded", LEDGER, "Ledger._require")
def _(require: Step) -> Step:
    def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        return require(self, device, count, others, replace(memory or self._memory(device), free=24 * 2**30, total=24 * 2**30))

    return changed


@step_mutant("ledger_counts_own_only", LEDGER, "Ledger._require")
def _(require: Step) -> Step:
    def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        return require(self, device, count, [entry for entry in others if entry.pid == os.getpid()], memory)

    return changed


@step_mutant("ledger_ignores_free", LEDGER, "Ledger._require")
def _(require: Step) -> Step:
    def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        memory = memory or self._memory(device)
        return require(self, device, count, others, replace(memory, free=memory.total))

    return changed


@step_mutant("ledger_refuses_what_just_fits", LEDGER, "Ledger._require")
def _(require: Step) -> Step:
    def changed(self: Any, device: Any, count: int, others: Any, memory: Any = None) -> Any:
        return require(self, device, count + 1, others, memory)

    return changed


@step_mutant("ledger_mixes_devices", LEDGER, "Ledger._require")
def _(require: Step) -> Step:
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


step_mutant("ledger_counts_all_allocated_as_free", LEDGER, "Ledger.update")(_growing(lambda memory, _: memory.own))
step_mutant("ledger_counts_allocated_twice", LEDGER, "Ledger.update")(_growing(lambda *_: 0))
step_mutant("ledger_keeps_the_dead", LEDGER, "Ledger._living")(lambda _: lambda self: self._read())


@step_mutant("ledger_by_process_id_only", LEDGER, "Ledger._living")
def _(_: Step) -> Step:
    from blackswan.impl.ledger import process_start

    return lambda self: [entry for entry in self._read() if process_start(entry.pid) is not None]


step_mutant("ledger_update_forgotten", LEDGER, "Ledger.update")(lambda _: lambda _self, entry, _device, count: replace(entry, bytes=count))


@step_mutant("ledger_update_unchecked", LEDGER, "Ledger.update")
def _(_: Step) -> Step:
    def changed(self: Any, entry: Any, _device: Any, count: int) -> Any:
        with self._locked():
            grown = replace(entry, bytes=count)
            self._write([*(other for other in self._living() if other.id != entry.id), grown])
        return grown

    return changed


step_mutant("ledger_release_forgotten", LEDGER, "Ledger.release")(lambda _: lambda *_arguments: None)


@step_mutant("ledger_releases_all_of_a_process", LEDGER, "Ledger.release")
def _(_: Step) -> Step:
    def changed(self: Any, entry: Any) -> None:
        with self._locked():
            self._write([other for other in self._living() if other.pid != entry.pid])

    return changed


@step_mutant("memory_refused_after_allocation", LEDGER, "reserve")
def _(reserve: Step) -> Step:
    @contextmanager
    def changed(*arguments: Any) -> Iterator[None]:
        yield
        with reserve(*arguments):
            pass

    return changed


@step_mutant("memory_refused_without_numbers", LEDGER, "Ledger.acquire")
def _(acquire: Step) -> Step:
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


step_mutant("estimate_without_scales", "blackswan.impl.memory", "estimate")(_estimate(_without("nf4_absmax")))
step_mutant("estimate_without_lora", "blackswan.impl.memory", "estimate")(_estimate(_without("lora", "head")))
step_mutant("estimate_without_optimiser", "blackswan.impl.memory", "estimate")(_estimate(_without("moments", "gradients", "update")))
step_mutant("estimate_without_activations", "blackswan.impl.memory", "estimate")(_estimate(_without("activations", "working")))


def _dequantised_as_activations(parts: dict[str, int], total: int) -> tuple[dict[str, int], int]:
    moved = parts.pop("dequantised_weights", 0)
    return parts | {"activations": parts["activations"] + moved}, total


step_mutant("estimate_calls_weights_activations", "blackswan.impl.memory", "estimate")(_estimate(_dequantised_as_activations))


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


step_mutant("estimate_of_one_sample", "blackswan.impl.memory", "estimate")(_estimate_of_other(lambda given: given.update(batch=1)))
step_mutant("estimate_always_in_bfloat16", "blackswan.impl.memory", "estimate")(
    _estimate_of_other(lambda given: given.update(dtype=torch.bfloat16))
)
step_mutant("estimate_always_quantised", "blackswan.impl.memory", "estimate")(
    _estimate_of_other(lambda given: given.update(adaptation=replace(given["adaptation"], nf4=True)))
)


# loading with NF4


@step_mutant("load_all_before_quantising", "blackswan.impl.classifier", "Converted")
def _(converted: Step) -> Step:
    def changed(*arguments: Any, **options: Any) -> Any:
        return dict(converted(*arguments, **options))

    return changed


@step_mutant("load_reads_all_shards", "blackswan.impl.checkpoint", "load_checkpoint")
def _(load: Step) -> Step:
    def changed(folder: Any) -> Any:
        found = load(folder)
        return replace(found, tensors=dict(found.tensors))

    return changed


@step_mutant("load_unquantised_with_warning", "blackswan.impl.classifier", "Body")
def _(body: Step) -> Step:
    def changed(config: Any, tensors: Any, nf4: bool) -> Any:
        import warnings

        if nf4:
            warnings.warn("NF4 is not available: going on without", stacklevel=2)
        return body(config, tensors, False)

    return changed


@step_mutant("load_last_layer_unquantised", "blackswan.impl.decoder", "Layer")
def _(layer: Step) -> Step:
    return lambda config, path, tensors, nf4: layer(config, path, tensors, nf4 and not path.endswith(f".{config.layers - 1}"))


# what is not finite


@step_mutant("origin_of_nan_only", "blackswan.impl.nonfinite", "_bad")
def _(_: Step) -> Step:
    return lambda value: value.is_floating_point() and bool(value.isnan().any())


@step_mutant("origin_of_the_first_part", "blackswan.impl.nonfinite", "torch.tensor_split")
def _(split: Step) -> Step:
    return lambda value, count: split(value, count)[:1]


step_mutant("origin_of_forward_only", "blackswan.impl.nonfinite", "_own")(lambda _: lambda _path, _operation, _name, value: value)


@step_mutant("origin_names_the_logits", "blackswan.impl.nonfinite", "_watched")
def _(_: Step) -> Step:
    """What a check of the logits alone can say."""
    from blackswan.impl.nonfinite import _bad, _Found

    def changed(path: str, operation: str, function: Step, arguments: Any) -> Any:
        result = function(**arguments)
        if path == "score" and _bad(result):
            raise _Found(f"{path} ({operation}): not finite")
        return result

    return changed


@step_mutant("origin_leaves_gradients", "blackswan.impl.nonfinite", "torch.autograd.grad")
def _(_: Step) -> Step:
    return lambda loss, inputs: loss.backward(inputs=inputs)


@step_mutant("training_swallows_bad_gradients", "blackswan.impl.optimiser", "AdamW.flat_gradient")
def _(flat: Step) -> Step:
    return lambda self: torch.nan_to_num(flat(self), nan=0.0, posinf=0.0, neginf=0.0)


@step_mutant("training_steps_on_bad_gradients", "blackswan.impl.validation", "require_finite_norm")
def _(_: Step) -> Step:
    return lambda *_arguments: None


# to the device and back


@step_mutant("sync_lora_rounded", "blackswan.impl.optimiser", "AdamW.state")
def _(state: Step) -> Step:
    return lambda self: {
        name: value.bfloat16().to(value.dtype) if name.startswith("trainable/") else value for name, value in state(self).items()
    }


@step_mutant("sync_layers_swapped", "blackswan.impl.decoder", "Layer")
def _(layer: Step) -> Step:
    def changed(config: Any, path: str, tensors: Any, nf4: bool) -> Any:
        made = layer(config, path, tensors, nf4)
        other = f"model.layers.{config.layers - 1 - int(path.rpartition('.')[2])}"
        made.self_attn.o_proj.weight = torch.nn.Parameter(tensors[f"{other}.self_attn.o_proj.weight"], requires_grad=False)
        return made

    return changed


@step_mutant("sync_head_bias_dropped", "blackswan.impl.classifier", "Head.__init__")
def _(init: Step) -> Step:
    def changed(self: Any, weight: Any, bias: Any) -> None:
        init(self, weight, torch.zeros_like(bias))

    return changed
