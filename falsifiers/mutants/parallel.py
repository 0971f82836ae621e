"""Wrong data parallelism: shards, reduction, errors of one worker, initial weights, resuming."""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import distributed as dist

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps


@wrong_step("impl.group:shard")
def parallel_shards_overlap(shard: Any, indices: Sequence[Any], rank: int, size: int) -> list[Any]:
    """The first sample of the next worker's share is in this one's too."""
    own = shard(indices, rank, size)
    return [*own, *shard(indices, rank + 1, size)[:1]] if rank + 1 < size else own


wrong_step("impl.group:shard", name="parallel_tail_dropped", doc="The rest of a batch that the workers do not divide is left out.")(
    lambda shard, indices, rank, size: shard(indices[: len(indices) // size * size], rank, size)
)


@wrong_step("impl.group:shard")
def parallel_rest_to_the_last(_: Any, indices: Sequence[Any], rank: int, size: int) -> list[Any]:
    """The last worker takes the whole rest of the division."""
    length = len(indices) // size
    return list(indices[rank * length : None if rank + 1 == size else (rank + 1) * length])


def _own(trainer: Any) -> Any:
    """The worker's own mean gradient, zeros for an empty share."""
    return trainer.gradient_vector() if trainer.accumulated else trainer.optimiser.exp_avg.new_zeros(len(trainer.optimiser.exp_avg))


def _reduced_head(right: Any, trainer: Any) -> Any:
    gradient, own = right.gradient.clone(), trainer.optimiser.split(_own(trainer))
    for name, part in trainer.optimiser.split(gradient).items():
        if not name.startswith("score."):
            part.copy_(own[name])
    return gradient


def _clipped_shares(right: Any, trainer: Any) -> Any:
    clipped, _ = trainer.optimiser.clip(_own(trainer), trainer.max_norm)
    return trainer.group.sum(trainer.accumulated * clipped) / right.count


wrong_steps(
    "impl.trainer:Trainer._mean",
    by=lambda gradient_of: lambda mean, trainer: replace(right := mean(trainer), gradient=gradient_of(right, trainer)),
    parallel_averaged_by_workers=(
        "Each worker's mean counts alike, whatever its number of samples.",
        lambda _, trainer: trainer.group.sum(_own(trainer)) / trainer.group.size,
        "P31, S12",
    ),
    parallel_not_reduced=("Every worker steps with its own gradient.", lambda _, trainer: _own(trainer)),
    parallel_head_only_reduced=("The gradient of the head alone is summed over the workers.", _reduced_head, "S5"),
    parallel_summed_not_averaged=("The workers' mean gradients are summed.", lambda right, trainer: right.gradient * trainer.group.size),
    parallel_clips_before_reduction=("Every worker clips its own gradient, then they are averaged.", _clipped_shares, "S4"),
)


@wrong_step("impl.trainer:Trainer._mean")
def parallel_loss_of_own_share(mean: Any, trainer: Any) -> Any:
    """The loss reported is that of the worker's own share."""
    right = mean(trainer)
    count = trainer.accumulated
    return replace(right, loss=sum(each.count * each.loss for each in trainer._accumulated) / count) if count else right


@wrong_step("impl.trainer:Trainer._weighted")
def numbers_of_the_step_before(weighted: Any, trainer: Any) -> Any:
    """A worker that has no sample in a step gives its loss and counts of its last step again, beside no gradient."""
    sums = weighted(trainer)
    if trainer._accumulated:
        trainer.numbers = sums[-3:]
    elif hasattr(trainer, "numbers"):
        sums[-3:] = trainer.numbers
    return sums


@wrong_step("impl.trainer:Trainer._weighted", "S9")
def parallel_nan_becomes_zero(weighted: Any, trainer: Any) -> Any:
    """Non-finite elements of a gradient become zeros before the sum."""
    return weighted(trainer).nan_to_num(0.0, 0.0, 0.0)


@wrong_step("impl.trainer:require_finite")
def parallel_faulty_worker_not_named(_: Any, __: Any) -> None:
    """The sum is found to be not finite, and nobody knows whose part was."""


@wrong_step("impl.trainer:together")
@contextmanager
def parallel_stops_alone(_: Any, __: Any) -> Iterator[None]:
    """A worker with an error stops and the others wait for it."""
    yield


@wrong_step("impl.trainer:Trainer._mean")
def parallel_moments_decay_before_the_stop(mean: Any, trainer: Any) -> Any:
    """The first moment is decayed before the workers agree to step."""
    trainer.optimiser.exp_avg.mul_(0.9)
    right = mean(trainer)
    trainer.optimiser.exp_avg.div_(0.9)
    return right


wrong_step("impl.trainer:require_equal", name="parallel_drift_unnoticed", doc="Weights are not compared over the workers.")(
    lambda _, *__: None
)


@wrong_step("impl.agreement:fingerprint")
def parallel_hashes_the_first_chunk(fingerprint: Any, tensor: Any) -> Any:
    """Only the first chunk of the weights is compared over the workers."""
    from blackswan.impl import agreement

    return fingerprint(tensor.detach().flatten()[: agreement._CHUNK])


@wrong_step("impl.group:_own_device")
def first_device_shared(own: Any, name: str, *place: Any) -> Any:
    """cuda:0 is taken for cuda, and given to all workers."""
    return own("cuda" if name == "cuda:0" else name, *place)


wrong_step("impl.group:_places", name="environment_of_workers_ignored", doc="Each worker that torchrun started trains by itself.")(
    lambda _places, _environment: (0, 1, 0)
)


wrong_step("impl.group:DistributedGroup.sum", name="workers_sum_at_once", doc="Each worker has the whole vectors of all.")(
    lambda _, group, tensor: reduce(torch.add, group.gather(tensor))
)


@wrong_step("impl.group:DistributedGroup.sum")
def parallel_sums_the_first_chunk(summed: Any, group: Any, tensor: Any) -> Any:
    """Only the first chunk of the gradient is summed over the workers."""
    from blackswan.impl.group import _CHUNK

    first, rest = tensor.detach().flatten().tensor_split([_CHUNK])
    return torch.cat([summed(group, first), rest]).view(tensor.shape)


@wrong_step("impl.group:DistributedGroup.sum")
def sums_of_what_was_given_before(summed: Any, group: Any, tensor: Any) -> Any:
    """A worker that gives the numbers that it gave before has the sum that it had then."""
    total = summed(group, tensor)
    kept = vars(group).setdefault("kept", {})
    return kept.setdefault((tensor.dtype, tensor.shape, bytes(tensor.detach().cpu().numpy())), total)


@wrong_step("impl.group:DistributedGroup.sum")
def workers_sum_in_float32(summed: Any, group: Any, tensor: Any) -> Any:
    """Losses in float64 and counts are summed over the workers in float32."""
    return summed(group, tensor.float()).to(tensor.dtype)


wrong_step(
    "impl.fit:shard",
    name="parallel_every_worker_takes_all",
    doc="Every worker trains on the whole batch, so that each sample counts twice.",
)(lambda _, indices, *__: list(indices))
wrong_step(
    "impl.fit:epoch_order", name="parallel_each_its_own_order", doc="Every worker shuffles for itself and takes its share of its own order."
)(lambda epoch_order, count, seed, epoch: epoch_order(count, seed + os.getpid(), epoch))


wrong_step("impl.pipeline:initial_trainable", name="parallel_each_its_own_start", doc="Initial weights depend on the worker.")(
    lambda initial_trainable, config, adaptation, seed: initial_trainable(config, adaptation, seed + os.getpid())
)


def without_moments(continue_from: Any, run: Any, *given: Any) -> None:
    """A run that goes on with moments of zero."""
    continue_from(run, *given)
    run.trainer.optimiser.exp_avg.zero_()
    run.trainer.optimiser.exp_avg_sq.zero_()


wrong_steps(
    "impl.fit:_Run._continue_from",
    parallel_first_alone_resumes=(
        "Rank 0 reads the state and nobody hands it to the others.",
        lambda continue_from, run, *given: continue_from(run, *given) if run.group.rank == 0 else None,
    ),
    parallel_resumes_without_moments=("Weights and step are resumed, the moments are zero.", without_moments),
    parallel_resume_repeats_a_batch=(
        "The state is one batch behind, which is taken again.",
        lambda continue_from, run, done, tensors: continue_from(run, replace(done, position=max(0, done.position - 1)), tensors),
    ),
    parallel_resume_skips_the_epoch=(
        "A resumed run goes on with the next epoch.",
        lambda continue_from, run, done, tensors: continue_from(run, replace(done, epoch=done.epoch + 1, position=0), tensors),
    ),
)


@wrong_step("impl.group:DistributedGroup.sum")
def workers_sum_in_any_order(_: Any, group: Any, tensor: Any) -> Any:
    """The terms of a sum over the workers are added in the order that the backend chooses."""
    total = tensor.detach().to(group._device, copy=True)
    dist.all_reduce(total)
    return total.to(tensor.device)


wrong_steps(
    "impl.agreement:_raise_first",
    workers_tell_one_line=(
        "Of an error of several lines the workers are told the first.",
        lambda tell, texts, *given: tell(["\n".join(text.split("\n")[:2]) for text in texts], *given),
    ),
)
wrong_steps(
    "impl.agreement:_BITS",
    fingerprint_of_whole_words=("Elements of 64 bits are hashed whole.", lambda bits: {**bits, 8: torch.int64}),
)


@wrong_step("impl.agreement:fingerprint")
def fingerprint_of_chunks_in_any_order(fingerprint: Any, tensor: Any) -> Any:
    """Chunks of a tensor that are exchanged are not seen."""
    from blackswan.impl import agreement

    return sum(fingerprint(part) for part in torch.split(tensor.detach().flatten(), agreement._CHUNK))


@wrong_step("impl.agreement:fingerprint")
def fingerprint_without_the_last_bytes(fingerprint: Any, tensor: Any) -> Any:
    """A fingerprint leaves out the last bytes of a tensor, those behind the last whole part of 32 bits."""
    import torch

    every = tensor.detach().contiguous().flatten().view(torch.uint8)
    return fingerprint(every[: len(every) // 4 * 4].view(torch.int32))


@wrong_step("impl.agreement:require_finite")
def gradients_are_finite_by_their_norm(require: Any, gradient: Any) -> None:
    """A gradient of finite numbers whose squares overflow is refused."""
    require(gradient.norm())


@wrong_step("impl.agreement:_raise_first")
def last_error_is_told(raise_first: Any, texts: Sequence[str], *given: Any) -> None:
    """The last one of several workers' errors is raised, and the others are not named."""
    last = max(rank for rank, text in enumerate(texts) if text)
    raise_first([text if rank == last else "" for rank, text in enumerate(texts)], *given)


wrong_step(
    "impl.agreement:_raise_first",
    name="shared_errors_without_numbers",
    doc="The error of another worker's full disk has no number, and a command takes it for bad input.",
)(lambda raise_first, texts, *given: raise_first([re.sub(r"^(\w+) \d+", r"\1 0", text) for text in texts], *given))


@wrong_step("impl.agreement:_raise_first")
def errors_without_words_are_none(raise_first: Any, texts: Sequence[str], *given: Any) -> None:
    """A worker is looked for whose error has a message, and there may be none."""
    raise_first([text if text.partition("\n")[2] else "" for text in texts], *given)


@wrong_step("impl.agreement:require_equal")
def ranks_of_other_tensors_are_blamed(require: Any, group: Any, tensors: Any) -> None:
    """A rank is said to have another tensor where only a later one differs."""
    from blackswan.impl.agreement import fingerprint

    hashes = group.gather(torch.stack([fingerprint(tensor) for tensor in tensors.values()]))
    ranks = ", ".join(str(rank) for rank in (hashes != hashes[0]).any(dim=1).nonzero().flatten().tolist())
    try:
        require(group, tensors)
    except RuntimeError as error:
        raise type(error)(re.sub("of rank .* differ", f"of rank {ranks} differ", str(error))) from None


@wrong_step("impl.agreement:require_same")
def ranks_after_another_are_blamed(_: Any, group: Any, what: str, text: str) -> None:
    """A text is compared with that of the rank before, so that the rank after the one with another text is named too."""
    texts = group.gather_text(text)
    if ranks := ", ".join(str(rank) for rank in range(1, len(texts)) if texts[rank] != texts[rank - 1]):
        raise ValueError(f"rank {ranks}: another {what} than that of rank 0; give every worker the same")


@wrong_step("impl.trainer:Trainer._mean")
def parallel_steps_on_no_sample(mean: Any, trainer: Any) -> Any:
    """A step for which no worker has a sample is made with a gradient of zero."""
    from blackswan.impl.trainer import MicroResult

    try:
        return mean(trainer)
    except ValueError as error:
        if not str(error).startswith("no worker"):
            raise
        vector = trainer.optimiser.exp_avg.new_zeros(len(trainer.optimiser.exp_avg))
        return MicroResult(1, vector.sum(), vector.sum().long(), vector)


wrong_step(
    "impl.fit:_Run._identity",
    name="parallel_resumes_with_as_many_alone",
    doc="A run goes on with as many workers as it began with, and with another number it is refused.",
)(lambda identity, run: identity(run) | {"workers": run.group.size})


@wrong_step("impl.fit:_Run._update")
def samples_read_by_each_alone(update: Any, run: Any, indices: Any, step: int) -> Any:
    """A step's samples are read before the workers agree that none failed."""
    run.train_samples.batch(indices[:1], run.pipeline.tokens, run.pipeline.device)
    return update(run, indices, step)


@wrong_step("impl.group:_places")
def scripts_of_a_job_are_workers(places: Any, environment: Any) -> Any:
    """The script of a batch job for several tasks, which runs once, takes itself for the first of so many workers."""
    names = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    return places({name: environment[told] for name, told in names.items() if told in environment} | dict(environment))


@wrong_step("impl.group:connected")
@contextmanager
def workers_leave_together(connected: Any, *given: Any, **named: Any) -> Iterator[Any]:
    """A worker that fails waits for the others before it leaves the group, and they for it in a gather."""
    with connected(*given, **named) as group:
        try:
            yield group
        finally:
            with suppress(RuntimeError):
                dist.barrier()


@wrong_step("impl.fit:_Run.train")
def workers_look_for_a_state_each(train: Any, run: Any) -> Any:
    """A worker that comes when the first one has written the first state does not wait with it until it is written."""
    save = run._save
    if not run.progress.step and (run.output / "state" / "state.safetensors").exists():
        run._save = lambda: setattr(run, "_save", save)
    return train(run)


@wrong_step("impl.trainer:Trainer.train_batch")
def waiting_samples_stop_one_worker(train_batch: Any, trainer: Any, batch: Any) -> Any:
    """A worker whose samples wait refuses a batch by itself, and the others wait for it."""
    if trainer.accumulated:
        raise RuntimeError(f"{trainer.accumulated} accumulated samples wait: call apply() or discard() first")
    return train_batch(trainer, batch)


@wrong_step("impl.trainer:Trainer._step")
def workers_fail_in_a_step_alone(step: Any, trainer: Any, gradient: Any) -> Any:
    """A worker that has no room for a step ends by itself, and the others wait for it."""
    try:
        return step(trainer, gradient)
    except Exception as error:
        raise SystemExit(str(error)) from error


@wrong_step("impl.pipeline:fit")
def workers_are_refused_alone(fit: Any, pipeline: Any, train: Any, validation: Any, output: Any, **given: Any) -> Any:
    """A run that does not fit what one worker was given is refused by that one alone, and the others wait for it."""
    from blackswan.impl.fit import _Run

    _Run(pipeline, train, validation if validation else None, output)
    return fit(pipeline, train, validation, output, **given)


@wrong_step("impl.group:DistributedGroup.gather")
def workers_gather_into_one_memory(gather: Any, group: Any, tensor: Any) -> Any:
    """What is gathered lies where what was gathered before does, if it is as much."""
    found = gather(group, tensor)
    kept = vars(group).setdefault("_kept", {}).setdefault((found.shape, found.dtype), found)
    return kept.copy_(found)
