"""Training that keeps what it does not need: one step of `impl` replaced each."""

from collections.abc import Callable
from typing import Any

from blackswan.falsifiers.mutants.patches import step_mutant

Step = Callable[..., Any]


@step_mutant("training_keeps_every_loss", "blackswan.impl.classifier", "Classifier.loss")
def _(loss: Step) -> Step:
    def changed(self: Any, *arguments: Any) -> Any:
        found = loss(self, *arguments)
        vars(self).setdefault("history", []).append(found)
        return found

    return changed


@step_mutant("training_keeps_every_result", "blackswan.impl.trainer", "Trainer._micro_batch")
def _(micro_batch: Step) -> Step:
    def changed(self: Any, *arguments: Any) -> Any:
        found = micro_batch(self, *arguments)
        vars(self).setdefault("history", []).append(found.correct)
        return found

    return changed


@step_mutant("optimiser_keeps_old_moments", "blackswan.impl.optimiser", "AdamW.step")
def _(step: Step) -> Step:
    def changed(self: Any, *arguments: Any) -> None:
        vars(self).setdefault("history", []).append(self.exp_avg)
        step(self, *arguments)

    return changed


@step_mutant("step_keeps_plain_weights", "blackswan.impl.nf4", "Nf4Weight.__init__")
def _(init: Step) -> Step:
    def changed(self: Any, path: str, weight: Any, *arguments: Any, **options: Any) -> None:
        init(self, path, weight, *arguments, **options)
        self.register_buffer("plain", weight.clone())

    return changed


@step_mutant("fused_stores_codes_twice", "blackswan.impl.fused.weights", "JoinedWeight.__init__")
def _(init: Step) -> Step:
    def changed(self: Any, projections: Any, *arguments: Any) -> None:
        init(self, projections, *arguments)
        for projection in projections:
            if projection.quantized is not None:
                projection.quantized.codes = projection.quantized.codes.clone()

    return changed


@step_mutant("nf4_keeps_what_it_dequantised", "blackswan.impl.nf4", "Nf4Weight.dequantized")
def _(dequantized: Step) -> Step:
    def changed(self: Any, dtype: Any) -> Any:
        return vars(self).setdefault("kept", {}).setdefault(dtype, dequantized(self, dtype))

    return changed


@step_mutant("fused_keeps_what_it_dequantised", "blackswan.impl.fused.weights", "JoinedWeight.dequantized")
def _(dequantized: Step) -> Step:
    def changed(self: Any, room: Any) -> Any:
        if "kept" not in vars(self):
            self.kept = dequantized(self, room).clone()
        return self.kept

    return changed


@step_mutant("embedding_not_frozen", "blackswan.impl.decoder", "Body.__init__")
def _(init: Step) -> Step:
    def changed(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.embed_tokens.weight.requires_grad_()

    return changed
