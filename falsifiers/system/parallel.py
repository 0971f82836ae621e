"""Data parallelism: shards, several workers against the reference, faults on one of them, a worker killed."""

from dataclasses import replace
from functools import partial

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly, same_structure
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.numeric.strategies import Draw, build
from blackswan.falsifiers.system.engines import engines
from blackswan.reference.table import Array, Arrays, Table

WORKERS = 2
MOST_WORKERS = 9
CHUNKS = (13, 40)
"""Elements that the ranks sum or hash at a time: few enough that the smallest classifier here has several chunks."""


def shards_are_complete_and_disjoint(attack: Attack, case: Case) -> list[Comparison]:
    """Batches of any length, the empty one and those shorter than the group too, with sample numbers in any order."""
    rng = generator_for(case.seed, "shards")
    found = []
    for count in (0, 1, int(rng.integers(2, 64)), int(rng.integers(64, 512))):
        size = int(rng.integers(1, MOST_WORKERS))
        indices = rng.permutation(3 * count)[:count]
        answer = attack.answer(case, scalars={"indices": indices.tolist(), "size": size})
        shards = [answer[f"rank{rank}"] for rank in range(size)]
        name = f"{count} samples on {size} workers"
        found.append(compare_exactly(name, np.append(np.sort(indices), -1), np.append(np.sort(np.concatenate(shards)), -1)))
        lengths = [len(part) for part in shards]
        if max(lengths) - min(lengths) > 1:
            found.append(broken(name, "shares of unequal size", "lengths that differ by at most one", str(lengths)))
    return found


def workers_follow_the_reference(attack: Attack, case: Case) -> list[Comparison]:
    """Losses, norms, trainable tensors and moments of rank 0 within the tolerance; of the others equal to rank 0's, bit for bit."""
    training, found = _training(attack, case), []
    for engine in engines(attack):
        ranks, failed = _answers(attack, case, training, engine)
        found += failed or [*_like_the_reference(attack, training, ranks[0]), *_alike(ranks)]
    return found


def _like_the_reference(attack: Attack, training: Case, answer: Arrays) -> list[Comparison]:
    inner = replace(attack, claim=replace(attack.claim, operation=training.operation))
    expected = inner.expect(training)

    def rounded(inputs: Arrays, table: Table) -> dict[str, Array]:
        return reference.evaluate(training.operation, inputs, training.scalars, table)

    floors = partial(inner.floor, training, rounded, expected)
    return inner.judge(expected, answer, floors, inner.dtypes(expected), inner.reach(training))


def workers_hold_the_same_weights(attack: Attack, case: Case) -> list[Comparison]:
    """Every tensor of rank 1 and on against rank 0's, bit for bit; and one weight that is 2⁻¹⁰ away on one rank stops the run, be it any or
    the very last."""
    training, found = _training(attack, case), []
    for engine in engines(attack):
        ranks, failed = _answers(attack, case, training, engine)
        found += failed or [*_alike(ranks), *_drift_is_noticed(attack, case, training, engine)]
    return found


def _drift_is_noticed(attack: Attack, case: Case, training: Case, engine: str) -> list[Comparison]:
    rng = generator_for(case.seed, "drift")
    anywhere = _fault(rng, training, "drift")
    found = []
    for fault in (anywhere, {**anywhere, "tensor": -1, "element": -1}):
        answer = attack.answer(case, scalars=_request(training, engine, fault) | _chunk(case))
        found += [_stopped(answer, engine, rank, anywhere["step"], "WorkerFailed", "rank 1") for rank in range(WORKERS)]
    return found


def fault_stops_every_worker(attack: Attack, case: Case) -> list[Comparison]:
    """A NaN or an infinity in one element of one rank's gradient, then a label out of range on one rank.

    Every rank stops at that step with the rank named, and holds what it held before the step.
    """
    training, rng = _training(attack, case), generator_for(case.seed, "fault")
    found = []
    for kind, error in (("gradient", "FloatingPointError"), ("label", "ValueError")):
        fault = _fault(rng, training, kind)
        for engine in engines(attack):
            answer = attack.answer(case, scalars=_request(training, engine, fault))
            for rank in range(WORKERS):
                found.append(_stopped(answer, engine, rank, fault["step"], error, f"rank {fault['rank']}"))
                found += _unchanged(answer, engine, rank) if found[-1].held else []
    return found


def _fault(rng: Generator, training: Case, kind: str) -> dict[str, int | float | str]:
    return {
        "kind": kind,
        "rank": int(rng.integers(WORKERS)),
        "step": int(rng.integers(training.scalars["steps"])),
        "tensor": int(rng.integers(64)),
        "value": float(rng.choice([np.nan, np.inf, -np.inf])),
        "element": int(rng.integers(1024)),
    }


def _stopped(answer: Arrays, engine: str, rank: int, step: int | float | str, error: str, word: str) -> Comparison:
    name, text = f"{engine}: rank {rank}", str(answer.get(f"rank{rank}/stopped", answer["errors"][rank] or "trained to the end"))
    if not text.startswith(f"{error}: ") or word not in text:
        return broken(name, "did not stop, or for another reason", f"{error} naming {word}", text)
    return compare_exactly(f"{name}, step of the stop", np.asarray(step), answer[f"rank{rank}/step"])


def _unchanged(answer: Arrays, engine: str, rank: int) -> list[Comparison]:
    before = f"rank{rank}/before/"
    return [
        compare_exactly(f"{engine}: {name}", value, answer[name.replace("/before/", "/after/", 1)])
        for name, value in answer.items()
        if name.startswith(before)
    ]


def _training(attack: Attack, case: Case) -> Case:
    """A case of `train_steps` drawn from the seed: at least two samples for each worker together, shares unequal more often than not."""
    rng = generator_for(case.seed, "training")
    arguments = attack.claim.arguments

    def one(*choices: float | str) -> float | str:
        return choices[int(rng.integers(len(choices)))]

    low, high = arguments["batch"]
    sizes = {
        "batch": int(rng.integers(low, high + 1)),
        "seq": int(rng.integers(3, 8)),
        "vocab": 16,
        "hidden": 16,
        "intermediate": 24,
        "layers": 1,
        "kv_heads": 1,
        "groups": int(rng.integers(1, 3)),
        "half_dim": 4,
        "steps": int(rng.integers(2, 4)),
        "micro": int(rng.integers(1, 4)),
        "classes": int(rng.integers(2, 5)),
        "rank": int(rng.integers(1, 4)),
    }
    scalars = {
        "family": one("llama", "qwen2", "qwen3"),
        "eps": 1e-6,
        "theta": 10000.0,
        "tied": True,
        "alpha": 8.0,
        "targets": one("q_v", "all"),
        "pooling": one("mean", "last"),
        "nf4": False,
        "learning_rate": 1e-2,
        "weight_decay": one(0.01, 0.1),
        "max_norm": one(0.1, 1.0),
        "warmup_fraction": 0.0,
        "schedule": one("constant", "linear"),
    }
    draw = Draw(sizes, scalars, {"class_weights": str(one("absent", "present"))}, case.seed)
    return build(replace(attack.claim, operation="train_steps"), draw, str(one("normal", "right_padded")), attack.dtype)


def _request(training: Case, engine: str, fault: dict[str, int | float | str] | None = None) -> dict[str, object]:
    return {
        "workers": WORKERS,
        "engine": engine,
        "inputs": dict(training.inputs),
        "scalars": dict(training.scalars),
        "dtype": training.dtype,
        "fault": fault or {},
    }


def _chunk(case: Case) -> dict[str, int]:
    return {"chunk": int(generator_for(case.seed, "chunk").integers(*CHUNKS))}


def _answers(attack: Attack, case: Case, training: Case, engine: str) -> tuple[list[dict[str, Array]], list[Comparison]]:
    """The outputs of each rank, or what is wrong where one of them failed."""
    answer = attack.answer(case, scalars=_request(training, engine) | _chunk(case))
    failed = [str(answer.get(f"rank{rank}/stopped", answer["errors"][rank])) for rank in range(WORKERS)]
    found = [broken(f"rank {rank}", "failed", "an answer", text) for rank, text in enumerate(failed) if text]
    prefix = [f"rank{rank}/" for rank in range(WORKERS)]
    return [{name.removeprefix(each): v for name, v in answer.items() if name.startswith(each)} for each in prefix], found


def _alike(ranks: list[dict[str, Array]]) -> list[Comparison]:
    """Other ranks' outputs against those of rank 0, bit for bit."""
    dtypes = {name: value.dtype for name, value in ranks[0].items()}
    found = []
    for number, other in enumerate(ranks[1:], start=1):
        found += same_structure(ranks[0], other, dtypes) or [
            compare_exactly(f"{name} on rank {number}", value, other[name]) for name, value in ranks[0].items()
        ]
    return found
