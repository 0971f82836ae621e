"""Operations that round to bfloat16 once more than they have to: each of these hides in the noise of a single entry."""

from blackswan.falsifiers.mutants.changes import edited, in_bfloat16, with_result
from blackswan.falsifiers.mutants.registry import mutants

INVERSE = "1.0 / np.sqrt(mean_square + eps)"
POOLED = "np.where(weights > 0, weights * x, 0.0).sum(axis=1)"
mutants(
    "rms_norm",
    rms_norm_rounds_before_weight=(
        "The normalised row is rounded before it meets the weight.",
        edited(("(x * _inverse_rms(x, eps) * weight,)", "(in_bfloat16(x * _inverse_rms(x, eps)) * weight,)"), only="forward"),
    ),
    rms_norm_inverse_rounded=("The inverse root is rounded.", edited((INVERSE, f"in_bfloat16({INVERSE})"), only="forward")),
    rms_norm_gradient_rounds_before_scale=(
        "The projected gradient is rounded before it is divided by the root.",
        edited(("        dx -= normalised\n", "        dx = in_bfloat16(dx - normalised)\n"), only="backward"),
    ),
)
mutants(
    "qk_norm",
    qk_norm_rounds_before_weight=(
        "The normalised head is rounded before it meets the weight.",
        edited(("(x * _inverse_rms(x, eps) * weight,)", "(in_bfloat16(x * _inverse_rms(x, eps)) * weight,)"), only="forward"),
    ),
)
mutants(
    "rope",
    rope_tables_rounded=(
        "Cosines and sines are rounded.",
        edited(("np.cos(angle), np.sin(angle)  #", "in_bfloat16(np.cos(angle)), in_bfloat16(np.sin(angle))  #")),
    ),
    rope_products_rounded=(
        "Products are rounded before they are added.",
        edited(("first * cos - second * sin", "in_bfloat16(first * cos) - in_bfloat16(second * sin)")),
    ),
)
mutants(
    "softmax",
    softmax_exponentials_rounded=(
        "Exponentials are rounded before they are added and divided.",
        edited(("np.exp(shifted)", "in_bfloat16(np.exp(shifted))"), only="forward"),
    ),
    softmax_gradient_of_rounded=(
        "The gradient reads the probabilities as they were stored.",
        edited(
            ("backward_from_probabilities(dy, forward(x))", "backward_from_probabilities(dy, in_bfloat16(forward(x)))"), only="backward"
        ),
    ),
)
mutants(
    "swiglu",
    swiglu_activation_rounded=(
        "The activation is rounded before it meets the other branch.",
        edited(("    y *= gate\n", "    y = in_bfloat16(y * gate)\n"), only="forward"),
    ),
    swiglu_gradient_rounded=(
        "The gate's slope is rounded before it meets the other branch.",
        edited(("    slope *= opening  #", "    slope = in_bfloat16(slope * opening)  #"), only="backward"),
    ),
)
mutants(
    "pool",
    pool_weights_rounded=(
        "The sum is multiplied by a rounded 1 / length.",
        edited(("    return weights\n", "    return in_bfloat16(weights)\n")),
    ),
    pool_sum_rounded=(
        "The sum over the tokens is rounded before it is divided.",
        edited((POOLED, f"in_bfloat16({POOLED.replace('weights * x', 'x')}) * weights.max(axis=1)"), only="forward"),
    ),
)
mutants(
    "linear",
    linear_bias_after_rounding=(
        "The product is rounded before the bias is added.",
        edited(("y + bias", "in_bfloat16(y) + bias"), only="forward"),
    ),
    linear_weight_gradient_of_halves=(
        "The weight's gradient is that of two halves of the rows, each rounded.",
        edited(("outer(dy, x)  #", "in_bfloat16(outer(dy[::2], x[::2])) + in_bfloat16(outer(dy[1::2], x[1::2]))  #"), only="backward"),
    ),
)
mutants(
    "attention",
    attention_queries_scaled_first=(
        "Queries are multiplied by 1/sqrt(head_dim) and rounded before the product with the keys.",
        edited(
            ("queries @ keys.swapaxes(-1, -2)  #", "in_bfloat16(queries / math.sqrt(head_dim)) @ keys.swapaxes(-1, -2)  #"),
            ("    scores /= math.sqrt(head_dim)\n", ""),
            only="forward",
        ),
    ),
    attention_scores_rounded=(
        "Scores are rounded before the softmax.",
        edited(("    scores /= math.sqrt(head_dim)\n", "    scores[...] = in_bfloat16(scores / math.sqrt(head_dim))\n"), only="forward"),
    ),
)
mutants(
    "lora_linear",
    lora_update_rounded=(
        "The product with B is rounded, and once more after the scale.",
        edited(
            ("update = (x @ lora_a.T) @ lora_b.T", "update = in_bfloat16((x @ lora_a.T) @ lora_b.T)"),
            ("return base + _scale(alpha, lora_a) * update", "return base + in_bfloat16(_scale(alpha, lora_a) * update)"),
            only="forward",
        ),
    ),
)
for operation in ("lora_merge", "lora_unmerge"):
    mutants(
        operation,
        **{
            f"{operation}_update_rounded": (
                "The update is rounded before it is added.",
                with_result(lambda y, a: a["weight"] + in_bfloat16(y - a["weight"])),
            )
        },
    )
mutants(
    "nf4_dequantize",
    nf4_levels_rounded=(
        "The level is rounded before it meets the scale.",
        edited(("CODEBOOK[nibbles] * scale", "in_bfloat16(CODEBOOK[nibbles]) * scale")),
    ),
    nf4_scales_rounded=(
        "The scale is rounded before it meets the level.",
        edited(("CODEBOOK[nibbles] * scale", "CODEBOOK[nibbles] * in_bfloat16(scale)")),
    ),
)
mutants(
    "nf4_linear",
    nf4_linear_scales_rounded=(
        "The scale is rounded before it meets the level.",
        edited(("CODEBOOK[nibbles] * scale", "CODEBOOK[nibbles] * in_bfloat16(scale)")),
    ),
)
