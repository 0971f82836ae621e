"""What a claim about arrays compares where it is not plain parity: the named checks of contracts/checks.yaml, one function each."""

from collections.abc import Callable

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks import layers, lora, losses, models, nf4, optimiser, refusals, relations, slopes
from blackswan.falsifiers.numeric.comparison import Comparison

Check = Callable[[Attack, Case], list[Comparison]]

CHECKS: dict[str, Check] = {
    function.__name__: function
    for function in (
        relations.twice_the_same,
        relations.batch_equals_samples,
        relations.padding_changes_nothing,
        relations.padding_content_changes_nothing,
        relations.future_changes_nothing,
        relations.shift_changes_nothing,
        models.ablation_shows,
        refusals.refuses,
        layers.rows_form_a_simplex,
        layers.rotation_keeps_pair_norms,
        layers.scores_depend_on_distance,
        losses.gradient_rows_sum_to_zero,
        losses.zero_logits_give_log_classes,
        losses.loss_within_bounds,
        losses.loss_is_lipschitz,
        losses.loss_near_log_vocabulary,
        losses.held_out_loss_below_share_of_log_vocabulary,
        models.logits_are_not_flat,
        lora.zero_b_is_the_plain_layer,
        lora.merged_equals_unmerged,
        lora.unmerge_undoes_merge,
        lora.update_has_low_rank,
        models.both_factors_receive_gradients,
        nf4.nf4_error_within_half_a_gap,
        nf4.nf4_mean_error_in_band,
        nf4.nf4_requantises_to_itself,
        nf4.nf4_keeps_zero,
        nf4.nf4_mostly_not_zero,
        nf4.nf4_takes_half_a_byte,
        optimiser.decay_is_decoupled,
        optimiser.first_step_is_the_learning_rate,
        optimiser.scale_of_gradients_is_irrelevant,
        optimiser.converges_on_a_quadratic,
        optimiser.clipped_norm_is_bounded,
        optimiser.schedule_reaches_its_peak,
        slopes.slope_matches_gradient,
        slopes.step_changes_loss_as_predicted,
        models.accumulation_changes_nothing,
        models.every_trainable_tensor_moves,
        models.base_weights_unchanged,
        optimiser.decay_reaches_matrices_only,
    )
}
