"""Training that keeps what it does not need: one step of `impl` replaced each."""

from collections.abc import Callable
from typing import Any

from blackswan.falsifiers.mutants.registry import step_mutant

Step = Callable[..., Any]


@step_mutant("blackswan.impl.classifier", "Classifier.loss", "own")
def training_keeps_every_loss(loss: Step) -> Step:
    """Each batch's loss is kept with its graph."""

    def changed(self: Any, *arguments: Any) -> Any:
        found = loss(self, *arguments)
        vars(self).setdefault("history", []).append(found)
        return found

    return changed


@step_mutant("blackswan.impl.trainer", "Trainer._micro_batch", "own")
def training_keeps_every_result(micro_batch: Step) -> Step:
    """A list of metrics keeps their tensors."""

    def changed(self: Any, *arguments: Any) -> Any:
        found = micro_batch(self, *arguments)
        vars(self).setdefault("history", []).append(found.correct)
        return found

    return changed


@step_mutant("blackswan.impl.optimiser", "AdamW.step", "own")
def optimiser_keeps_old_moments(step: Step) -> Step:
    """The moments before each step are kept."""

    def changed(self: Any, *arguments: Any) -> None:
        vars(self).setdefault("history", []).append(self.exp_avg)
        step(self, *arguments)

    return changed


@step_mutant("blackswan.impl.nf4", "Nf4Weight.__init__", "own")
def step_keeps_plain_weights(init: Step) -> Step:
    """The plain weights are kept beside their NF4 codes."""

    def changed(self: Any, path: str, weight: Any, *arguments: Any, **options: Any) -> None:
        init(self, path, weight, *arguments, **options)
        self.register_buffer("plain", weight.clone())

    return changed


@step_mutant("blackswan.impl.fused.weights", "JoinedWeight.__init__", "own")
def fused_stores_codes_twice(init: Step) -> Step:
    """The hand-written layers join the codes, and the projections keep theirs."""

    def changed(self: Any, projections: Any, *arguments: Any) -> None:
        init(self, projections, *arguments)
        for projection in projections:
            if projection.quantized is not None:
                projection.quantized.codes = projection.quantized.codes.clone()

    return changed


@step_mutant("blackswan.impl.nf4", "Nf4Weight.dequantized", "own")
def nf4_keeps_what_it_dequantised(dequantized: Step) -> Step:
    """A weight that was dequantised once is kept in that dtype."""

    def changed(self: Any, dtype: Any) -> Any:
        return vars(self).setdefault("kept", {}).setdefault(dtype, dequantized(self, dtype))

    return changed


@step_mutant("blackswan.impl.fused.weights", "JoinedWeight.dequantized", "own")
def fused_keeps_what_it_dequantised(dequantized: Step) -> Step:
    """The same in the hand-written layers."""

    def changed(self: Any, room: Any) -> Any:
        if "kept" not in vars(self):
            self.kept = dequantized(self, room).clone()
        return self.kept

    return changed


@step_mutant("blackswan.impl.decoder", "Body.__init__", "own")
def embedding_not_frozen(init: Step) -> Step:
    """The frozen embedding requires a gradient, and gets one."""

    def changed(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.embed_tokens.weight.requires_grad_()

    return changed
