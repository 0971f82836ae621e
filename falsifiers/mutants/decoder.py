"""Wrong decoders and classifiers: a correct model whose blocks are put together in a wrong way."""

import re
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.registry import mutants
from blackswan.falsifiers.mutants.variation import Made, wrong_calls
from blackswan.reference.classifier import NF4_BLOCK

WEIGHT_NAME = re.compile(r"^model\.layers\.(\d+)\.(?=.*(weight|bias)$)")


def _in_last_layer(made: Made) -> bool:
    return made.path.startswith(f"model.layers.{made.scalars['layers'] - 1}.")


def _passed(made: Made) -> str:
    """The name of what the call was given, for its result."""
    return str(made.arguments["x"])


def _last_passed(made: Made) -> str:
    return _passed(made) if _in_last_layer(made) else made.run()


def _mirrored(made: Made) -> str:
    """The first layer reads the parameters of the last, and the last those of the first."""
    last = made.scalars["layers"] - 1

    def renamed(value: Any) -> Any:
        found = WEIGHT_NAME.match(value) if isinstance(value, str) else None
        layer = int(found[1]) if found else 0
        return WEIGHT_NAME.sub(f"model.layers.{ {0: last, last: 0}.get(layer, layer) }.", value) if found else value

    return made.run(**{name: renamed(value) for name, value in made.arguments.items()})


def _positions_by_column(made: Made) -> str:
    positions = made.value("positions")
    return made.run_on("positions", np.broadcast_to(np.arange(positions.shape[1]), positions.shape))


def _other_norm(made: Made) -> str:
    other = {"input_layernorm": "post_attention_layernorm", "post_attention_layernorm": "input_layernorm"}
    block, _, norm = made.path.rpartition(".")
    return made.run(weight=f"{block}.{other[norm]}.weight") if norm in other else made.run()


mutants(
    "decoder_forward",
    decoder_final_norm_dropped=("No final norm.", wrong_calls(_passed, at="model.norm".__eq__), "P14"),
    decoder_qkv_biases_dropped=("Q/K/V biases loaded and not applied.", wrong_calls(lambda made: made.run(bias=None), "linear"), "S1, P4"),
    decoder_layers_swapped=("Weights of the first and the last layer swapped at upload.", wrong_calls(_mirrored), "S29"),
    decoder_qk_norm_missing_in_one_block=("The last block lacks its QK-norm weights.", wrong_calls(_last_passed, "qk_norm"), "S16"),
    decoder_head_untied=(
        "Logits from a row-shifted embedding.",
        wrong_calls(lambda made: made.run_on("weight", np.roll(made.value("weight"), 1, axis=0)), at="lm_head".__eq__),
    ),
    decoder_logits_flat=(
        "Logits of a fresh, almost zero head instead of the loaded one.",
        wrong_calls(lambda made: made.run_on("weight", 1e-3 * made.value("weight")[::-1]), at="lm_head".__eq__),
        "S28",
    ),
    decoder_positions_count_padding=(
        "Positions by column; shows with padding between real tokens.",
        wrong_calls(_positions_by_column, "rope"),
        "S21, P9",
    ),
    decoder_positions_of_a_byte=(
        "Positions are counted by a byte, and begin again behind 255.",
        wrong_calls(lambda made: made.run_on("positions", made.value("positions") % 2**8), "rope"),
    ),
    decoder_last_layer_skipped=("One layer fewer.", wrong_calls(_last_passed, "residual_add")),
    decoder_norms_swapped=("The two norm weights of a block swapped.", wrong_calls(_other_norm, "rms_norm")),
    decoder_residual_from_norm=(
        "The residual of the MLP taken after the norm.",
        wrong_calls(
            lambda made: made.run(x=made.path.replace("mlp_residual", "post_attention_layernorm")),
            at=lambda path: path.endswith(".mlp_residual"),
        ),
    ),
    decoder_padding_ignored=(
        "The mask not passed on to attention.",
        wrong_calls(lambda made: made.run_on("mask", made.value("mask") | True), "attention"),
        "S21",
    ),
)


def _quantised_head(made: Made) -> str:
    if not made.scalars.get("nf4", False):
        return made.run()
    tape, weight, name = made.tape, made.arguments["weight"], "score.weight.nf4"
    rows, columns = tape.values[weight].shape
    tape.plainly(name, "nf4_quantize", weight=weight, block_size=NF4_BLOCK)
    stored = {"codes": f"{name}.codes", "absmax": f"{name}.absmax", "rows": rows, "columns": columns, "block_size": NF4_BLOCK}
    return made.run(weight=tape.plainly("score.weight.dequantized", "nf4_dequantize", **stored))


mutants(
    "classifier_forward",
    nf4_not_applied=(
        "NF4 asked for, the weights stay unquantised.",
        wrong_calls(lambda made: made.run(), nf4=False, double_quantize=False),
        "S27",
    ),
    nf4_double_not_applied=(
        "Double quantisation asked for, the absmax stay in float32.",
        wrong_calls(lambda made: made.run(), double_quantize=False),
        "own",
        "bfloat16",
    ),
    classifier_head_bias_dropped=("Head bias not added.", wrong_calls(lambda made: made.run(bias=None), at="score".__eq__)),
    classifier_head_quantised=(
        "NF4 asked for, the head is quantised by accident as well.",
        wrong_calls(_quantised_head, at="score".__eq__),
        "P18",
        "bfloat16",
    ),
    classifier_targets_q_k=(
        "Adapters of q and k: that of v is loaded and not applied.",
        wrong_calls(lambda made: made.run(alpha=0.0), "lora_linear", at=lambda path: path.endswith("v_proj")),
    ),
    classifier_adapters_of_last_layer_dropped=(
        "The last layer runs without its adapters.",
        wrong_calls(lambda made: made.run(alpha=0.0) if _in_last_layer(made) else made.run(), "lora_linear"),
    ),
    classifier_positions_count_padding=(
        "Positions by column; shows with padding between real tokens.",
        wrong_calls(_positions_by_column, "rope"),
        "S21, P9",
    ),
    classifier_pools_before_final_norm=("Hidden states pooled before the final norm.", wrong_calls(_passed, at="model.norm".__eq__), "P14"),
    classifier_one_projection_unquantised=(
        "NF4 asked for, down_proj stays unquantised.",
        wrong_calls(lambda made: made.path.removesuffix(".dequantized"), "nf4_dequantize", lambda path: "down_proj" in path),
        "S27",
        "bfloat16",
    ),
)
