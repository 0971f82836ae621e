"""Wrong data parallelism: shards, reduction, errors of one worker, initial weights, resuming."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from blackswan.falsifiers.mutants.patches import step_mutant


@step_mutant("parallel_shards_overlap", "blackswan.impl.group", "shard")
def _(shard: Any) -> Any:
    def overlapping(indices: Sequence[Any], rank: int, size: int) -> list[Any]:
        own = shard(indices, rank, size)
        return [*own, *shard(indices, rank + 1, size)[:1]] if rank + 1 < size else own

    return overlapping


@step_mutant("parallel_tail_dropped", "blackswan.impl.group", "shard")
def _(shard: Any) -> Any:
    return lambda indices, rank, size: shard(indices[: len(indices) // size * size], rank, size)


@step_mutant("parallel_rest_to_the_last", "blackswan.impl.group", "shard")
def _(shard: Any) -> Any:
    del shard

    def uneven(indices: Sequence[Any], rank: int, size: int) -> list[Any]:
        length = len(indices) // size
        return list(indices[rank * length : None if rank + 1 == size else (rank + 1) * length])

    return uneven


def _own(trainer: Any) -> Any:
    """The worker's own mean gradient, zeros for an empty share."""
    return trainer.gradient_vector() if trainer.accumulated else trainer.optimiser.exp_avg.new_zeros(len(trainer.optimiser.exp_avg))


@step_mutant("parallel_averaged_by_workers", "blackswan.impl.trainer", "Trainer._mean")
def _(mean: Any) -> Any:
    return lambda trainer: replace(mean(trainer), gradient=trainer.group.sum(_own(trainer)) / trainer.group.size)


@step_mutant("parallel_not_reduced", "blackswan.impl.trainer", "Trainer._mean")
def _(mean: Any) -> Any:
    return lambda trainer: replace(mean(trainer), gradient=_own(trainer))


@step_mutant("parallel_head_only_reduced", "blackswan.impl.trainer", "Trainer._mean")
def _(mean: Any) -> Any:
    def wrong(trainer: Any) -> Any:
        right = mean(trainer)
        gradient, own = right.gradient.clone(), trainer.optimiser.split(_own(trainer))
        for name, part in trainer.optimiser.split(gradient).items():
            if not name.startswith("score."):
                part.copy_(own[name])
        return replace(right, gradient=gradient)

    return wrong


@step_mutant("parallel_summed_not_averaged", "blackswan.impl.trainer", "Trainer._mean")
def _(mean: Any) -> Any:
    def wrong(trainer: Any) -> Any:
        right = mean(trainer)
        return replace(right, gradient=right.gradient * trainer.group.size)

    return wrong


@step_mutant("parallel_clips_before_reduction", "blackswan.impl.trainer", "Trainer._mean")
def _(mean: Any) -> Any:
    def wrong(trainer: Any) -> Any:
        right = mean(trainer)
        clipped, _ = trainer.optimiser.clip(_own(trainer), trainer.max_norm)
        return replace(right, gradient=trainer.group.sum(trainer.accumulated * clipped) / right.count)

    return wrong


@step_mutant("parallel_loss_of_own_share", "blackswan.impl.trainer", "Trainer._mean")
def _(mean: Any) -> Any:
    def wrong(trainer: Any) -> Any:
        right = mean(trainer)
        count = trainer.accumulated
        return replace(right, loss=sum(each.count * each.loss for each in trainer._accumulated) / count) if count else right

    return wrong


@step_mutant("parallel_nan_becomes_zero", "blackswan.impl.trainer", "Trainer._weighted")
def _(weighted: Any) -> Any:
    return lambda trainer: weighted(trainer).nan_to_num(0.0, 0.0, 0.0)


@step_mutant("parallel_faulty_worker_not_named", "blackswan.impl.trainer", "require_finite")
def _(require_finite: Any) -> Any:
    del require_finite
    return lambda _: None


@step_mutant("parallel_stops_alone", "blackswan.impl.trainer", "together")
def _(together: Any) -> Any:
    del together

    @contextmanager
    def alone(group: Any) -> Iterator[None]:
        del group
        yield

    return alone


@step_mutant("parallel_moments_decay_before_the_stop", "blackswan.impl.trainer", "Trainer._mean")
def _(mean: Any) -> Any:
    def wrong(trainer: Any) -> Any:
        trainer.optimiser.exp_avg.mul_(0.9)
        right = mean(trainer)
        trainer.optimiser.exp_avg.div_(0.9)
        return right

    return wrong


@step_mutant("parallel_drift_unnoticed", "blackswan.impl.trainer", "require_equal")
def _(require_equal: Any) -> Any:
    del require_equal
    return lambda *_: None


@step_mutant("parallel_hashes_the_first_chunk", "blackswan.impl.agreement", "fingerprint")
def _(fingerprint: Any) -> Any:
    from blackswan.impl import agreement

    return lambda tensor: fingerprint(tensor.detach().flatten()[: agreement._CHUNK])


@step_mutant("parallel_sums_the_first_chunk", "blackswan.impl.group", "DistributedGroup.sum")
def _(summed: Any) -> Any:
    import torch

    from blackswan.impl import group

    def wrong(self: Any, tensor: Any) -> Any:
        first, rest = tensor.detach().flatten().tensor_split([group._CHUNK])
        return torch.cat([summed(self, first), rest]).view(tensor.shape)

    return wrong


@step_mutant("parallel_every_worker_takes_all", "blackswan.impl.fit", "shard")
def _(shard: Any) -> Any:
    del shard
    return lambda indices, *_: list(indices)


@step_mutant("parallel_each_its_own_order", "blackswan.impl.fit", "epoch_order")
def _(epoch_order: Any) -> Any:
    return lambda count, seed, epoch: epoch_order(count, seed + os.getpid(), epoch)


@step_mutant("parallel_each_its_own_start", "blackswan.impl.pipeline", "initial_trainable")
def _(initial_trainable: Any) -> Any:
    return lambda config, adaptation, seed: initial_trainable(config, adaptation, seed + os.getpid())


@step_mutant("parallel_first_alone_resumes", "blackswan.impl.fit", "_Run._continue_from")
def _(continue_from: Any) -> Any:
    return lambda run, progress, tensors: continue_from(run, progress, tensors) if run.group.rank == 0 else None


@step_mutant("parallel_resumes_without_moments", "blackswan.impl.fit", "_Run._continue_from")
def _(continue_from: Any) -> Any:
    def wrong(run: Any, progress: Any, tensors: Any) -> None:
        continue_from(run, progress, tensors)
        run.trainer.optimiser.exp_avg.zero_()
        run.trainer.optimiser.exp_avg_sq.zero_()

    return wrong


@step_mutant("parallel_resume_repeats_a_batch", "blackswan.impl.fit", "_Run._continue_from")
def _(continue_from: Any) -> Any:
    return lambda run, progress, tensors: continue_from(run, replace(progress, position=max(0, progress.position - 1)), tensors)


@step_mutant("parallel_resume_skips_the_epoch", "blackswan.impl.fit", "_Run._continue_from")
def _(continue_from: Any) -> Any:
    return lambda run, progress, tensors: continue_from(run, replace(progress, epoch=progress.epoch + 1, position=0), tensors)
