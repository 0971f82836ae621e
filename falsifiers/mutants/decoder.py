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


@mutant("decoder_forward", "P14")
def decoder_final_norm_dropped(correct: Composition) -> Composition:
    """No final norm."""
    return varied(correct, _always(lambda made: made.arguments["x"] if made.path == "model.norm" else made.run()))


@mutant("decoder_forward", "S1", "P4")
def decoder_qkv_biases_dropped(correct: Composition) -> Composition:
    """Q/K/V biases loaded and not applied."""
    return varied(correct, _always(lambda made: made.run(bias=None) if made.operation == "linear" else made.run()))


@mutant("decoder_forward", "S29")
def decoder_layers_swapped(correct: Composition) -> Composition:
    """Weights of the first and the last layer swapped at upload."""

    def change_for(scalars: Scalars) -> Change:
        """Every call reads the parameters of the layer at the mirrored place, the first of the last and the last of the first."""

        def renamed(value: Any) -> Any:
            found = WEIGHT_NAME.match(value) if isinstance(value, str) and value.endswith((".weight", ".bias")) else None
            layers = {0: scalars["layers"] - 1, scalars["layers"] - 1: 0}
            return value if not found else WEIGHT_NAME.sub(f"model.layers.{layers.get(int(found[1]), int(found[1]))}.", value)

        return lambda made: made.run(**{name: renamed(value) for name, value in made.arguments.items()})

    return varied(correct, change_for)


@mutant("decoder_forward", "S16")
def decoder_qk_norm_missing_in_one_block(correct: Composition) -> Composition:
    """The last block lacks its QK-norm weights."""

    def change_for(scalars: Scalars) -> Change:
        def missing(made: Made) -> bool:
            return made.operation == "qk_norm" and made.path.startswith(_last_layer(scalars))

        return lambda made: made.arguments["x"] if missing(made) else made.run()

    return varied(correct, change_for)


@mutant("decoder_forward", "own")
def decoder_head_untied(correct: Composition) -> Composition:
    """Logits from a row-shifted embedding."""

    def shifted(made: Made) -> str:
        if made.path != "lm_head":
            return made.run()
        weight = made.arguments["weight"]
        return made.run(weight=made.tape.put(f"{weight}:shifted", np.roll(made.tape.values[weight], 1, axis=0)))

    return varied(correct, _always(shifted))


@mutant("decoder_forward", "S28")
def decoder_logits_flat(correct: Composition) -> Composition:
    """Logits of a fresh, almost zero head instead of the loaded one."""

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


@mutant("decoder_forward", "S21", "P9")
def decoder_positions_count_padding(correct: Composition) -> Composition:
    """Positions by column; shows with padding between real tokens."""
    return varied(correct, _always(_positions_by_column))


@mutant("decoder_forward", "own")
def decoder_last_layer_skipped(correct: Composition) -> Composition:
    """One layer fewer."""

    def change_for(scalars: Scalars) -> Change:
        def skipped(made: Made) -> bool:
            return made.operation == "residual_add" and made.path.startswith(_last_layer(scalars))

        return lambda made: made.arguments["x"] if skipped(made) else made.run()

    return varied(correct, change_for)


@mutant("decoder_forward", "own")
def decoder_norms_swapped(correct: Composition) -> Composition:
    """The two norm weights of a block swapped."""
    other = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}

    def swapped(made: Made) -> str:
        block, _, norm = made.path.rpartition(".")
        return made.run(weight=f"{block}.{other[norm]}.weight") if norm in other else made.run()

    return varied(correct, _always(swapped))


@mutant("decoder_forward", "own")
def decoder_residual_from_norm(correct: Composition) -> Composition:
    """The residual of the MLP taken after the norm."""

    def from_norm(made: Made) -> str:
        block, _, name = made.path.rpartition(".")
        return made.run(x=f"{block}.post_attention_layernorm") if name == "mlp_residual" else made.run()

    return varied(correct, _always(from_norm))


@mutant("decoder_forward", "S21")
def decoder_padding_ignored(correct: Composition) -> Composition:
    """The mask not passed on to attention."""

    def unmasked(made: Made) -> str:
        if made.operation != "attention":
            return made.run()
        if "all_real" not in made.tape.values:
            made.tape.put("all_real", np.ones_like(made.tape.values["mask"]))
        return made.run(mask="all_real")

    return varied(correct, _always(unmasked))


@mutant("classifier_forward", "S27")
def nf4_not_applied(correct: Composition) -> Composition:
    """NF4 asked for, the weights stay unquantised."""
    return varied(correct, _always(Made.run), nf4=False)


@mutant("classifier_forward", "own")
def classifier_head_bias_dropped(correct: Composition) -> Composition:
    """Head bias not added."""
    return varied(correct, _always(lambda made: made.run(bias=None) if made.path == "score" else made.run()))


@mutant("classifier_forward", "P18", hidden_in=("bfloat16",))
def classifier_head_quantised(correct: Composition) -> Composition:
    """NF4 asked for, the head is quantised by accident as well."""

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


@mutant("classifier_forward", "own")
def classifier_targets_q_k(correct: Composition) -> Composition:
    """Adapters of q and k: that of v is loaded and not applied."""

    def without_v(made: Made) -> str:
        if made.operation != "lora_linear" or not made.path.endswith("v_proj"):
            return made.run()
        return made.run(alpha=0.0)

    return varied(correct, _always(without_v))


@mutant("classifier_forward", "own")
def classifier_adapters_of_last_layer_dropped(correct: Composition) -> Composition:
    """The last layer runs without its adapters."""

    def change_for(scalars: Scalars) -> Change:
        def bare(made: Made) -> bool:
            return made.operation == "lora_linear" and made.path.startswith(_last_layer(scalars))

        return lambda made: made.run(alpha=0.0) if bare(made) else made.run()

    return varied(correct, change_for)


@mutant("classifier_forward", "S21", "P9")
def classifier_positions_count_padding(correct: Composition) -> Composition:
    """Positions by column; shows with padding between real tokens."""
    return varied(correct, _always(_positions_by_column))


@mutant("classifier_forward", "P14")
def classifier_pools_before_final_norm(correct: Composition) -> Composition:
    """Hidden states pooled before the final norm."""
    return varied(correct, _always(lambda made: made.arguments["x"] if made.path == "model.norm" else made.run()))


@mutant("classifier_forward", "S27", hidden_in=("bfloat16",))
def classifier_one_projection_unquantised(correct: Composition) -> Composition:
    """NF4 asked for, down_proj stays unquantised."""

    def original(made: Made) -> str:
        if made.operation == "nf4_dequantize" and made.path.endswith("down_proj.weight.dequantized"):
            return made.path.removesuffix(".dequantized")
        return made.run()

    return varied(correct, _always(original))
