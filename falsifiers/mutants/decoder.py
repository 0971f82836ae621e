"""Wrong decoders and classifiers: a correct model whose blocks are put together in a wrong way."""

import re
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.registry import mutant
from blackswan.falsifiers.mutants.variation import Change, Made, varied
from blackswan.reference.classifier import NF4_BLOCK
from blackswan.reference.table import Composition, Scalars

WEIGHT_NAME = re.compile(r"^model\.layers\.(\d+)\.")


def _last_layer(scalars: Scalars) -> str:
    return f"model.layers.{scalars['layers'] - 1}."


def _always(change: Change) -> Any:
    return lambda _: change


@mutant("decoder_final_norm_dropped")
def _(correct: Composition) -> Composition:
    return varied(correct, _always(lambda made: made.arguments["x"] if made.path == "model.norm" else made.run()))


@mutant("decoder_qkv_biases_dropped")
def _(correct: Composition) -> Composition:
    return varied(correct, _always(lambda made: made.run(bias=None) if made.operation == "linear" else made.run()))


@mutant("decoder_layers_swapped")
def _(correct: Composition) -> Composition:
    def change_for(scalars: Scalars) -> Change:
        """Every call reads the parameters of the layer at the mirrored place, the first of the last and the last of the first."""

        def renamed(value: Any) -> Any:
            found = WEIGHT_NAME.match(value) if isinstance(value, str) and value.endswith((".weight", ".bias")) else None
            layers = {0: scalars["layers"] - 1, scalars["layers"] - 1: 0}
            return value if not found else WEIGHT_NAME.sub(f"model.layers.{layers.get(int(found[1]), int(found[1]))}.", value)

        return lambda made: made.run(**{name: renamed(value) for name, value in made.arguments.items()})

    return varied(correct, change_for)


@mutant("decoder_qk_norm_missing_in_one_block")
def _(correct: Composition) -> Composition:
    def change_for(scalars: Scalars) -> Change:
        def missing(made: Made) -> bool:
            return made.operation == "qk_norm" and made.path.startswith(_last_layer(scalars))

        return lambda made: made.arguments["x"] if missing(made) else made.run()

    return varied(correct, change_for)


@mutant("decoder_head_untied")
def _(correct: Composition) -> Composition:
    def shifted(made: Made) -> str:
        if made.path != "lm_head":
            return made.run()
        weight = made.arguments["weight"]
        return made.run(weight=made.tape.put(f"{weight}:shifted", np.roll(made.tape.values[weight], 1, axis=0)))

    return varied(correct, _always(shifted))


@mutant("decoder_logits_flat")
def _(correct: Composition) -> Composition:
    def fresh(made: Made) -> str:
        if made.path != "lm_head":
            return made.run()
        weight = made.arguments["weight"]
        return made.run(weight=made.tape.put(f"{weight}:fresh", 1e-3 * made.tape.values[weight][::-1]))

    return varied(correct, _always(fresh))


def _positions_by_column(made: Made) -> str:
    if made.operation != "rope":
        return made.run()
    mask = made.tape.values["mask"]
    if "columns" not in made.tape.values:
        made.tape.put("columns", np.broadcast_to(np.arange(mask.shape[1]), mask.shape))
    return made.run(positions="columns")


@mutant("decoder_positions_count_padding")
def _(correct: Composition) -> Composition:
    return varied(correct, _always(_positions_by_column))


@mutant("decoder_last_layer_skipped")
def _(correct: Composition) -> Composition:
    def change_for(scalars: Scalars) -> Change:
        def skipped(made: Made) -> bool:
            return made.operation == "residual_add" and made.path.startswith(_last_layer(scalars))

        return lambda made: made.arguments["x"] if skipped(made) else made.run()

    return varied(correct, change_for)


@mutant("decoder_norms_swapped")
def _(correct: Composition) -> Composition:
    other = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}

    def swapped(made: Made) -> str:
        block, _, norm = made.path.rpartition(".")
        return made.run(weight=f"{block}.{other[norm]}.weight") if norm in other else made.run()

    return varied(correct, _always(swapped))


@mutant("decoder_residual_from_norm")
def _(correct: Composition) -> Composition:
    def from_norm(made: Made) -> str:
        block, _, name = made.path.rpartition(".")
        return made.run(x=f"{block}.post_attention_layernorm") if name == "mlp_residual" else made.run()

    return varied(correct, _always(from_norm))


@mutant("decoder_padding_ignored")
def _(correct: Composition) -> Composition:
    def unmasked(made: Made) -> str:
        if made.operation != "attention":
            return made.run()
        if "all_real" not in made.tape.values:
            made.tape.put("all_real", np.ones_like(made.tape.values["mask"]))
        return made.run(mask="all_real")

    return varied(correct, _always(unmasked))


@mutant("nf4_not_applied")
def _(correct: Composition) -> Composition:
    return varied(correct, _always(Made.run), nf4=False)


@mutant("classifier_head_bias_dropped")
def _(correct: Composition) -> Composition:
    return varied(correct, _always(lambda made: made.run(bias=None) if made.path == "score" else made.run()))


@mutant("classifier_head_quantised")
def _(correct: Composition) -> Composition:
    def change_for(scalars: Scalars) -> Change:
        def quantised(made: Made) -> str:
            if made.path != "score" or not scalars.get("nf4", False):
                return made.run()
            tape, weight, name = made.tape, made.arguments["weight"], "score.weight.nf4"
            rows, columns = tape.values[weight].shape
            tape.plainly(name, "nf4_quantize", weight=weight, block_size=NF4_BLOCK)
            stored = {"codes": f"{name}.codes", "absmax": f"{name}.absmax"}
            shape = {"rows": rows, "columns": columns, "block_size": NF4_BLOCK}
            return made.run(weight=tape.plainly("score.weight.dequantized", "nf4_dequantize", **stored, **shape))

        return quantised

    return varied(correct, change_for)


@mutant("classifier_targets_q_k")
def _(correct: Composition) -> Composition:
    def without_v(made: Made) -> str:
        if made.operation != "lora_linear" or not made.path.endswith("v_proj"):
            return made.run()
        return made.run(alpha=0.0)

    return varied(correct, _always(without_v))


@mutant("classifier_adapters_of_last_layer_dropped")
def _(correct: Composition) -> Composition:
    def change_for(scalars: Scalars) -> Change:
        def bare(made: Made) -> bool:
            return made.operation == "lora_linear" and made.path.startswith(_last_layer(scalars))

        return lambda made: made.run(alpha=0.0) if bare(made) else made.run()

    return varied(correct, change_for)


@mutant("classifier_positions_count_padding")
def _(correct: Composition) -> Composition:
    return varied(correct, _always(_positions_by_column))


@mutant("classifier_pools_before_final_norm")
def _(correct: Composition) -> Composition:
    return varied(correct, _always(lambda made: made.arguments["x"] if made.path == "model.norm" else made.run()))


@mutant("classifier_one_projection_unquantised")
def _(correct: Composition) -> Composition:
    def original(made: Made) -> str:
        if made.operation == "nf4_dequantize" and made.path.endswith("down_proj.weight.dequantized"):
            return made.path.removesuffix(".dequantized")
        return made.run()

    return varied(correct, _always(original))
