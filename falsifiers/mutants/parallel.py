"""Wrong data parallelism: shards, reduction, errors of one worker, initial weights, resuming."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from blackswan.falsifiers.mutants.registry import wrong_step

in_group = partial(wrong_step, "blackswan.impl.group")
in_trainer = partial(wrong_step, "blackswan.impl.trainer")
in_fit = partial(wrong_step, "blackswan.impl.fit")


@in_group("shard")
def parallel_shards_overlap(shard: Any, indices: Sequence[Any], rank: int, size: int) -> list[Any]:
    """The first sample of the next worker's share is in this one's too."""
    own = shard(indices, rank, size)
    return [*own, *shard(indices, rank + 1, size)[:1]] if rank + 1 < size else own


in_group("shard", name="parallel_tail_dropped", doc="The rest of a batch that the workers do not divide is left out.")(
    lambda shard, indices, rank, size: shard(indices[: len(indices) // size * size], rank, size)
)


@in_group("shard")
def parallel_rest_to_the_last(_: Any, indices: Sequence[Any], rank: int, size: int) -> list[Any]:
    """The last worker takes the whole rest of the division."""
    length = len(indices) // size
    return list(indices[rank * length : None if rank + 1 == size else (rank + 1) * length])


def _own(trainer: Any) -> Any:
    """The worker's own mean gradient, zeros for an empty share."""
    return trainer.gradient_vector() if trainer.accumulated else trainer.optimiser.exp_avg.new_zeros(len(trainer.optimiser.exp_avg))


@in_trainer("Trainer._mean", "P31", "S12")
def parallel_averaged_by_workers(mean: Any, trainer: Any) -> Any:
    """Each worker's mean counts alike, whatever its number of samples."""
    return replace(mean(trainer), gradient=trainer.group.sum(_own(trainer)) / trainer.group.size)


in_trainer("Trainer._mean", name="parallel_not_reduced", doc="Every worker steps with its own gradient.")(
    lambda mean, trainer: replace(mean(trainer), gradient=_own(trainer))
)


@in_trainer("Trainer._mean", "S5")
def parallel_head_only_reduced(mean: Any, trainer: Any) -> Any:
    """The gradient of the head alone is summed over the workers."""
    right = mean(trainer)
    gradient, own = right.gradient.clone(), trainer.optimiser.split(_own(trainer))
    for name, part in trainer.optimiser.split(gradient).items():
        if not name.startswith("score."):
            part.copy_(own[name])
    return replace(right, gradient=gradient)


@in_trainer("Trainer._mean")
def parallel_summed_not_averaged(mean: Any, trainer: Any) -> Any:
    """The workers' mean gradients are summed."""
    right = mean(trainer)
    return replace(right, gradient=right.gradient * trainer.group.size)


@in_trainer("Trainer._mean", "S4")
def parallel_clips_before_reduction(mean: Any, trainer: Any) -> Any:
    """Every worker clips its own gradient, then they are averaged."""
    right = mean(trainer)
    clipped, _ = trainer.optimiser.clip(_own(trainer), trainer.max_norm)
    return replace(right, gradient=trainer.group.sum(trainer.accumulated * clipped) / right.count)


@in_trainer("Trainer._mean")
def parallel_loss_of_own_share(mean: Any, trainer: Any) -> Any:
    """The loss reported is that of the worker's own share."""
    right = mean(trainer)
    count = trainer.accumulated
    return replace(right, loss=sum(each.count * each.loss for each in trainer._accumulated) / count) if count else right


@in_trainer("Trainer._weighted", "S9")
def parallel_nan_becomes_zero(weighted: Any, trainer: Any) -> Any:
    """Non-finite elements of a gradient become zeros before the sum."""
    return weighted(trainer).nan_to_num(0.0, 0.0, 0.0)


@in_trainer("require_finite")
def parallel_faulty_worker_not_named(_: Any, __: Any) -> None:
    """The sum is found to be not finite, and nobody knows whose part was."""


@in_trainer("together")
@contextmanager
def parallel_stops_alone(_: Any, __: Any) -> Iterator[None]:
    """A worker with an error stops and the others wait for it."""
    yield


@in_trainer("Trainer._mean")
def parallel_moments_decay_before_the_stop(mean: Any, trainer: Any) -> Any:
    """The first moment is decayed before the workers agree to step."""
    trainer.optimiser.exp_avg.mul_(0.9)
    right = mean(trainer)
    trainer.optimiser.exp_avg.div_(0.9)
    return right


in_trainer("require_equal", name="parallel_drift_unnoticed", doc="Weights are not compared over the workers.")(lambda _, *__: None)


@wrong_step("blackswan.impl.agreement", "fingerprint")
def parallel_hashes_the_first_chunk(fingerprint: Any, tensor: Any) -> Any:
    """Of the weights that are compared over the workers the first chunk alone."""
    from blackswan.impl import agreement

    return fingerprint(tensor.detach().flatten()[: agreement._CHUNK])


@in_group("DistributedGroup.sum")
def parallel_sums_the_first_chunk(summed: Any, group: Any, tensor: Any) -> Any:
    """Of the gradient the first chunk alone is summed over the workers."""
    import torch

    from blackswan.impl.group import _CHUNK

    first, rest = tensor.detach().flatten().tensor_split([_CHUNK])
    return torch.cat([summed(group, first), rest]).view(tensor.shape)


in_fit("shard", name="parallel_every_worker_takes_all", doc="Every worker trains on the whole batch, so that each sample counts twice.")(
    lambda _, indices, *__: list(indices)
)
in_fit("epoch_order", name="parallel_each_its_own_order", doc="Every worker shuffles for itself and takes its share of its own order.")(
    lambda epoch_order, count, seed, epoch: epoch_order(count, seed + os.getpid(), epoch)
)


@wrong_step("blackswan.impl.pipeline", "initial_trainable")
def parallel_each_its_own_start(initial_trainable: Any, config: Any, adaptation: Any, seed: Any) -> Any:
    """Initial weights depend on the worker."""
    return initial_trainable(config, adaptation, seed + os.getpid())


in_fit("_Run._continue_from", name="parallel_first_alone_resumes", doc="Rank 0 reads the state and nobody hands it to the others.")(
    lambda continue_from, run, progress, tensors: continue_from(run, progress, tensors) if run.group.rank == 0 else None
)


@in_fit("_Run._continue_from")
def parallel_resumes_without_moments(continue_from: Any, run: Any, progress: Any, tensors: Any) -> None:
    """Weights and step are resumed, the moments are zero."""
    continue_from(run, progress, tensors)
    run.trainer.optimiser.exp_avg.zero_()
    run.trainer.optimiser.exp_avg_sq.zero_()


in_fit("_Run._continue_from", name="parallel_resume_repeats_a_batch", doc="The state is one batch behind, which is taken again.")(
    lambda continue_from, run, progress, tensors: continue_from(run, replace(progress, position=max(0, progress.position - 1)), tensors)
)
in_fit("_Run._continue_from", name="parallel_resume_skips_the_epoch", doc="A resumed run goes on with the next epoch.")(
    lambda continue_from, run, progress, tensors: continue_from(run, replace(progress, epoch=progress.epoch + 1, position=0), tensors)
)
