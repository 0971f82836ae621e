"""Memory over many steps, and at most: bytes that a run keeps, and the peak of one model's step."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, compare_exactly, value_at_most
from blackswan.falsifiers.numeric.generators import generator_for
from blackswan.falsifiers.numeric.whole_model import SHAPES
from blackswan.falsifiers.system.engines import engines
from blackswan.falsifiers.system.resident import stays

STEPS = {"cpu": 30, "cuda": 1000}
LENGTHS = 3
GIB = 2**30
FAMILIES = ("llama", "qwen2", "qwen3")
LIMITS = {"torch": 4.0, "fused": 3.5}
"""GiB at most for a QLoRA step of a 0.5B model, 16 samples of 256 tokens. The first is what its card was said to need; the second is the
engine's that a GPU runs by default, which keeps less for the backward pass."""
RUN = {"classes": 5, "rank": 16, "targets": "q_v", "nf4": True, "dtype": "bfloat16"}
LARGE: Mapping[str, Any] = {**SHAPES["qwen2.5-0.5b"], **RUN, "batch": 16, "seq": 256}
SMALL: Mapping[str, Any] = {
    "vocab": 40, "hidden": 64, "intermediate": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, **RUN, "batch": 3, "seq": 16,
}  # fmt: skip
"""What is measured without a GPU, in one of the families."""


def steps_keep_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """Steps on batches of a few lengths, each seen several times before: no byte more is live after them, or held in reserve."""
    kind = attack.subject.device.split(":")[0]
    found = []
    for engine in engines(attack):
        scalars = _small(case) | {"engine": engine, "steps": STEPS[kind], "warm_up": 4 * LENGTHS}
        answer = attack.answer(case, scalars=scalars)
        found.append(compare_exactly(f"{engine}: steps made", np.asarray(scalars["steps"] + scalars["warm_up"]), answer["made"]))
        found += [
            compare_exactly(f"{engine}: {name} beyond those before", np.asarray(0), answer[name])
            for name in ("live", "reserved", "segments")
        ]
    return found


def _small(case: Case) -> dict[str, Any]:
    """A small classifier, micro-batches that do not divide the batch, and lengths in three classes of what is packed."""
    rng = generator_for(case.seed, "leak")
    nf4, layers, seq = bool(rng.integers(2)), int(rng.integers(1, 3)), 200
    lengths = [int(rng.integers(seq * part // LENGTHS, seq * (part + 1) // LENGTHS)) + 1 for part in range(LENGTHS)]
    sizes = {"vocab": 40, "hidden": 64, "intermediate": 96, "layers": layers, "heads": 4, "kv_heads": 2, "head_dim": 16}
    adapted = {"classes": 3, "rank": 2, "targets": str(rng.choice(["q_v", "all"])), "nf4": nf4}
    run = {"dtype": "float32", "seed": int(case.seed) % 2**31, "batch": 5, "micro": int(rng.choice([2, 5])), "seq": seq, "lengths": lengths}
    return {"family": str(rng.choice(FAMILIES)), **sizes, **adapted, **run}


def step_stays_below(attack: Attack, case: Case) -> list[Comparison]:
    """Loading a model with NF4 and training it, by each engine: the peak against its limit, and what stays of a projection's weight.

    On a GPU both are measured. Elsewhere they are estimated for one, and what stays is measured of a small model too.
    """
    kind, found = attack.subject.device.split(":")[0], []
    for engine, limit in LIMITS.items():
        run = {**LARGE, "engine": engine, "measured_on": "cuda" if kind == "cuda" else None, "seed": int(case.seed) % 2**31}
        answer = attack.answer(case, scalars=run)
        found.append(value_at_most(f"{engine}: GiB at the peak", float(answer["peak"]) / GIB, limit))
        found += stays(run, answer)
    if kind != "cuda":
        family = str(generator_for(case.seed, "family").choice(FAMILIES))
        run = {**SMALL, "family": family, "engine": "torch", "measured_on": "cpu", "seed": int(case.seed) % 2**31}
        found += stays(run, attack.answer(case, scalars=run))
    return found
