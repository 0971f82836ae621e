"""The named checks of contracts/checks.yaml: what a claim compares where it is not plain parity."""

from collections.abc import Callable

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks import layers, lora, losses, models, nf4, optimiser, refusals, relations, slopes
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.system import (
    entry_points,
    parallel,
    parallel_runs,
    runs,
    scores,
    split_runs,
)

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
        split_runs.validation_samples_are_not_trained_on,
        parallel.shards_are_complete_and_disjoint,
        parallel.workers_follow_the_reference,
        parallel.workers_hold_the_same_weights,
        parallel.fault_stops_every_worker,
        parallel_runs.killed_run_resumes,
        runs.run_steps_follow_the_reference,
        runs.every_sample_once_an_epoch,
        runs.rates_are_the_schedules,
        runs.validation_loss_is_the_mean_over_samples,
        runs.best_checkpoint_has_the_lowest_loss,
        runs.stops_after_patience_epochs,
        runs.killed_run_goes_on,
        runs.refuses_to_continue_another_run,
        runs.run_keeps_the_base_weights,
        runs.nf4_run_is_quantised_and_trains,
        entry_points.gradient_vector_goes_out_and_in,
        entry_points.trainable_count_is_the_formulas,
        entry_points.evaluation_changes_nothing,
        entry_points.empty_batch_has_accuracy_zero,
        scores.scores_are_of_the_largest_logits,
        runs.non_finite_value_stops_the_run,
        optimiser.decay_reaches_matrices_only,
    )
}
