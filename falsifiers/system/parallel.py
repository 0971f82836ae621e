"""Data parallelism: shards, several workers against the reference, faults on one of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_inside
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.strategies import Draw, build
from blackswan.falsifiers.subjects.doors.training import Fault, Steps
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array, Arrays, Table

WORKERS = 2
MOST_WORKERS = 9
CHUNKS = (13, 40)
"""Elements that the ranks sum or hash at a time: few enough that the smallest classifier here has several chunks."""
STEPS = "train_steps"


def shards_are_complete_and_disjoint(trial: Trial) -> Iterator[Comparison]:
    """The shares of a batch hold each sample once and differ by one at most, for empty batches and those shorter than the group too."""
    rng = trial.rng("shards")
    for count in (0, 1, int(rng.integers(2, 64)), int(rng.integers(64, 512))):
        size = int(rng.integers(1, MOST_WORKERS))
        samples = rng.permutation(3 * count)[:count].tolist()
        shares = trial.trainer.shares(samples, size)
        name, lengths = f"{count} samples on {size} workers", [len(share) for share in shares]
        yield from same(name, sorted(samples), sorted(sample for share in shares for sample in share))
        yield value_inside(f"{name}: difference between the shares' lengths", max(lengths) - min(lengths), 0, 1)


def workers_follow_the_reference(trial: Trial, *, batch: Sequence[int]) -> list[Comparison]:
    """Losses, norms, trainable tensors and moments of rank 0 are the reference's within noise; those of other ranks are rank 0's bits.

    So they are after a step for which no worker has a sample, which every one refuses.
    """
    training = _training(trial, batch)

    def rounded(inputs: Arrays, table: Table) -> dict[str, Array]:
        return reference.evaluate(STEPS, inputs, training.scalars, table)

    def judge(_: str, ranks: list[Steps]) -> list[Comparison]:
        expected = reference.evaluate(STEPS, training.inputs, training.scalars)
        nothing = same("refusals of a step on no sample", [True] * WORKERS, ["sample" in each.nothing for each in ranks])
        return [*trial.within_noise(training, rounded, expected, ranks[0].outputs), *_alike(ranks), *nothing]

    return _by_each_backend(trial, training, judge)


def workers_hold_the_same_weights(trial: Trial, *, batch: Sequence[int]) -> list[Comparison]:
    """Every tensor of the other ranks is rank 0's, bit for bit; a weight that is 2⁻¹⁰ away on one rank, any or the last, stops the run."""
    training = _training(trial, batch)
    return _by_each_backend(trial, training, lambda backend, ranks: [*_alike(ranks), *_drift_is_noticed(trial, training, backend)])


def _drift_is_noticed(trial: Trial, training: Case, backend: str) -> list[Comparison]:
    anywhere = _fault(trial.rng("drift"), training, "drift")
    found = []
    for fault in (anywhere, replace(anywhere, tensor=-1, element=-1)):
        ranks = trial.trainer.steps_in_parallel(training, backend, WORKERS, _chunk(trial), fault)
        found += [_stopped(f"{backend}: rank {rank}", each, fault, "WorkerFailed", "rank 1") for rank, each in enumerate(ranks)]
    return found


def fault_stops_every_worker(trial: Trial, *, batch: Sequence[int]) -> list[Comparison]:
    """A NaN or an infinity in one element of one rank's gradient, then a label out of range, then samples that wait, on one rank.

    Every rank stops at that step with the rank named, and holds what it held before the step.
    """
    training, rng = _training(trial, batch), trial.rng("fault")
    found = []
    for kind, error in (("gradient", "FloatingPointError"), ("label", "ValueError"), ("waiting", "WorkerFailed")):
        fault = _fault(rng, training, kind)
        for backend in trial.trainer.backends:
            for rank, each in enumerate(trial.trainer.steps_in_parallel(training, backend, WORKERS, None, fault)):
                name = f"{backend}: rank {rank}, a bad {kind} on rank {fault.rank}"
                found.append(_stopped(name, each, fault, error, f"rank {fault.rank}"))
                found += same(f"{name}, ranks that are named beside it", False, f"also on rank {1 - fault.rank}" in each.stopped)
                found += same(f"{name}, state after the stop", each.before, each.after) if found[-1].held else []
    return found


def _fault(rng: Generator, training: Case, kind: str) -> Fault:
    return Fault(
        kind=kind,
        rank=int(rng.integers(WORKERS)),
        step=int(rng.integers(training.scalars["steps"])),
        tensor=int(rng.integers(64)),
        value=float(rng.choice([np.nan, np.inf, -np.inf])),
        element=int(rng.integers(1024)),
    )


def _stopped(name: str, steps: Steps, fault: Fault, error: str, word: str) -> Comparison:
    text = steps.stopped or "trained to the end"
    if not text.startswith(f"{error}: ") or word not in text:
        return broken(name, "did not stop, or for another reason", f"{error} naming {word}", text)
    return same(f"{name}, step of the stop", fault.step, steps.step)[0]


def _training(trial: Trial, batch: Sequence[int]) -> Case:
    """A case of `train_steps` drawn from the seed, with the least to the most samples a batch: shares are unequal more often than not."""
    rng = trial.rng("training")

    def one(*choices: float | str) -> float | str:
        return choices[int(rng.integers(len(choices)))]

    sizes = {
        **{
            "batch": int(rng.integers(batch[0], batch[1] + 1)),
            "seq": int(rng.integers(3, 8)),
            "vocab": 16,
            "hidden": 16,
            "intermediate": 24,
        },
        **{"layers": 1, "kv_heads": 1, "groups": int(rng.integers(1, 3)), "half_dim": 4, "steps": int(rng.integers(2, 4))},
        **{"micro": int(rng.integers(1, 4)), "classes": int(rng.integers(2, 5)), "rank": int(rng.integers(1, 4))},
    }
    scalars = {
        **{"family": one("llama", "qwen2", "qwen3"), "eps": 1e-6, "theta": 10000.0, "tied": True, "alpha": 8.0, "nf4": False},
        **{"targets": one("q_v", "all"), "pooling": one("mean", "last"), "learning_rate": 1e-2, "weight_decay": one(0.01, 0.1)},
        **{"max_norm": one(0.1, 1.0), "warmup_fraction": 0.0, "schedule": one("constant", "linear")},
    }
    draw = Draw(sizes, scalars, {"class_weights": str(one("absent", "present"))}, trial.seed)
    return build(replace(trial.claim, operation=STEPS), draw, str(one("normal", "right_padded")), trial.dtype)


def _chunk(trial: Trial) -> int:
    return int(trial.rng("chunk").integers(*CHUNKS))


def _by_each_backend(trial: Trial, training: Case, judge: Callable[[str, list[Steps]], Any]) -> list[Comparison]:
    """Runs the ranks by each backend and compares them by `judge`; a rank that failed is a broken comparison."""
    found: list[Comparison] = []
    for backend in trial.trainer.backends:
        ranks = trial.trainer.steps_in_parallel(training, backend, WORKERS, _chunk(trial), None)
        failed = [broken(f"{backend}: rank {rank}", "failed", "an answer", each.stopped) for rank, each in enumerate(ranks) if each.stopped]
        found += failed or [replace(each, tensor=f"{backend}: {each.tensor}") for each in judge(backend, ranks)]
    return found


def _alike(ranks: list[Steps]) -> list[Comparison]:
    """Other ranks' outputs against those of rank 0, bit for bit."""
    return [
        each for rank, other in enumerate(ranks[1:], start=1) for each in same(f"rank {rank} against 0", ranks[0].outputs, other.outputs)
    ]
