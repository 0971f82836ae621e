"""Wrong data parallelism: shards, reduction, errors of one worker, initial weights, resuming."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from blackswan.falsifiers.mutants.registry import step_mutant


@step_mutant("blackswan.impl.group", "shard", "own")
def parallel_shards_overlap(shard: Any) -> Any:
    """The first sample of the next worker's share is in this one's too."""

    def overlapping(indices: Sequence[Any], rank: int, size: int) -> list[Any]:
        own = shard(indices, rank, size)
        return [*own, *shard(indices, rank + 1, size)[:1]] if rank + 1 < size else own

    return overlapping


@step_mutant("blackswan.impl.group", "shard", "own")
def parallel_tail_dropped(shard: Any) -> Any:
    """The rest of a batch that the workers do not divide is left out."""
    return lambda indices, rank, size: shard(indices[: len(indices) // size * size], rank, size)


@step_mutant("blackswan.impl.group", "shard", "own")
def parallel_rest_to_the_last(shard: Any) -> Any:
    """The last worker takes the whole rest of the division."""
    del shard

    def uneven(indices: Sequence[Any], rank: int, size: int) -> list[Any]:
        length = len(indices) // size
        return list(indices[rank * length : None if rank + 1 == size else (rank + 1) * length])

    return uneven


def _own(trainer: Any) -> Any:
    """The worker's own mean gradient, zeros for an empty share."""
    return trainer.gradient_vector() if trainer.accumulated else trainer.optimiser.exp_avg.new_zeros(len(trainer.optimiser.exp_avg))


@step_mutant("blackswan.impl.trainer", "Trainer._mean", "P31", "S12")
def parallel_averaged_by_workers(mean: Any) -> Any:
    """Each worker's mean counts alike, whatever its number of samples."""
    return lambda trainer: replace(mean(trainer), gradient=trainer.group.sum(_own(trainer)) / trainer.group.size)


@step_mutant("blackswan.impl.trainer", "Trainer._mean", "own")
def parallel_not_reduced(mean: Any) -> Any:
    """Every worker steps with its own gradient."""
    return lambda trainer: replace(mean(trainer), gradient=_own(trainer))


@step_mutant("blackswan.impl.trainer", "Trainer._mean", "S5")
def parallel_head_only_reduced(mean: Any) -> Any:
    """The gradient of the head alone is summed over the workers."""

    def wrong(trainer: Any) -> Any:
        right = mean(trainer)
        gradient, own = right.gradient.clone(), trainer.optimiser.split(_own(trainer))
        for name, part in trainer.optimiser.split(gradient).items():
            if not name.startswith("score."):
                part.copy_(own[name])
        return replace(right, gradient=gradient)

    return wrong


@step_mutant("blackswan.impl.trainer", "Trainer._mean", "own")
def parallel_summed_not_averaged(mean: Any) -> Any:
    """The workers' mean gradients are summed."""

    def wrong(trainer: Any) -> Any:
        right = mean(trainer)
        return replace(right, gradient=right.gradient * trainer.group.size)

    return wrong


@step_mutant("blackswan.impl.trainer", "Trainer._mean", "S4")
def parallel_clips_before_reduction(mean: Any) -> Any:
    """Every worker clips its own gradient, then they are averaged."""

    def wrong(trainer: Any) -> Any:
        right = mean(trainer)
        clipped, _ = trainer.optimiser.clip(_own(trainer), trainer.max_norm)
        return replace(right, gradient=trainer.group.sum(trainer.accumulated * clipped) / right.count)

    return wrong


@step_mutant("blackswan.impl.trainer", "Trainer._mean", "own")
def parallel_loss_of_own_share(mean: Any) -> Any:
    """The loss reported is that of the worker's own share."""

    def wrong(trainer: Any) -> Any:
        right = mean(trainer)
        count = trainer.accumulated
        return replace(right, loss=sum(each.count * each.loss for each in trainer._accumulated) / count) if count else right

    return wrong


@step_mutant("blackswan.impl.trainer", "Trainer._weighted", "S9")
def parallel_nan_becomes_zero(weighted: Any) -> Any:
    """Non-finite elements of a gradient become zeros before the sum."""
    return lambda trainer: weighted(trainer).nan_to_num(0.0, 0.0, 0.0)


@step_mutant("blackswan.impl.trainer", "require_finite", "own")
def parallel_faulty_worker_not_named(require_finite: Any) -> Any:
    """The sum is found to be not finite, and nobody knows whose part was."""
    del require_finite
    return lambda _: None


@step_mutant("blackswan.impl.trainer", "together", "own")
def parallel_stops_alone(together: Any) -> Any:
    """A worker with an error stops and the others wait for it."""
    del together

    @contextmanager
    def alone(group: Any) -> Iterator[None]:
        del group
        yield

    return alone


@step_mutant("blackswan.impl.trainer", "Trainer._mean", "own")
def parallel_moments_decay_before_the_stop(mean: Any) -> Any:
    """The first moment is decayed before the workers agree to step."""

    def wrong(trainer: Any) -> Any:
        trainer.optimiser.exp_avg.mul_(0.9)
        right = mean(trainer)
        trainer.optimiser.exp_avg.div_(0.9)
        return right

    return wrong


@step_mutant("blackswan.impl.trainer", "require_equal", "own")
def parallel_drift_unnoticed(require_equal: Any) -> Any:
    """Weights are not compared over the workers."""
    del require_equal
    return lambda *_: None


@step_mutant("blackswan.impl.agreement", "fingerprint", "own")
def parallel_hashes_the_first_chunk(fingerprint: Any) -> Any:
    """Of the weights that are compared over the workers the first chunk alone."""
    from blackswan.impl import agreement

    return lambda tensor: fingerprint(tensor.detach().flatten()[: agreement._CHUNK])


@step_mutant("blackswan.impl.group", "DistributedGroup.sum", "own")
def parallel_sums_the_first_chunk(summed: Any) -> Any:
    """Of the gradient the first chunk alone is summed over the workers."""
    import torch

    from blackswan.impl import group

    def wrong(self: Any, tensor: Any) -> Any:
        first, rest = tensor.detach().flatten().tensor_split([group._CHUNK])
        return torch.cat([summed(self, first), rest]).view(tensor.shape)

    return wrong


@step_mutant("blackswan.impl.fit", "shard", "own")
def parallel_every_worker_takes_all(shard: Any) -> Any:
    """Every worker trains on the whole batch, so that each sample counts twice."""
    del shard
    return lambda indices, *_: list(indices)


@step_mutant("blackswan.impl.fit", "epoch_order", "own")
def parallel_each_its_own_order(epoch_order: Any) -> Any:
    """Every worker shuffles for itself and takes its share of its own order."""
    return lambda count, seed, epoch: epoch_order(count, seed + os.getpid(), epoch)


@step_mutant("blackswan.impl.pipeline", "initial_trainable", "own")
def parallel_each_its_own_start(initial_trainable: Any) -> Any:
    """Initial weights depend on the worker."""
    return lambda config, adaptation, seed: initial_trainable(config, adaptation, seed + os.getpid())


@step_mutant("blackswan.impl.fit", "_Run._continue_from", "own")
def parallel_first_alone_resumes(continue_from: Any) -> Any:
    """Rank 0 reads the state and nobody hands it to the others."""
    return lambda run, progress, tensors: continue_from(run, progress, tensors) if run.group.rank == 0 else None


@step_mutant("blackswan.impl.fit", "_Run._continue_from", "own")
def parallel_resumes_without_moments(continue_from: Any) -> Any:
    """Weights and step are resumed, the moments are zero."""

    def wrong(run: Any, progress: Any, tensors: Any) -> None:
        continue_from(run, progress, tensors)
        run.trainer.optimiser.exp_avg.zero_()
        run.trainer.optimiser.exp_avg_sq.zero_()

    return wrong


@step_mutant("blackswan.impl.fit", "_Run._continue_from", "own")
def parallel_resume_repeats_a_batch(continue_from: Any) -> Any:
    """The state is one batch behind, which is taken again."""
    return lambda run, progress, tensors: continue_from(run, replace(progress, position=max(0, progress.position - 1)), tensors)


@step_mutant("blackswan.impl.fit", "_Run._continue_from", "own")
def parallel_resume_skips_the_epoch(continue_from: Any) -> Any:
    """A resumed run goes on with the next epoch."""
    return lambda run, progress, tensors: continue_from(run, replace(progress, epoch=progress.epoch + 1, position=0), tensors)
