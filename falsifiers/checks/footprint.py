"""Memory over many steps, and at most: bytes that a run keeps, and the peak of one model's step."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from falsifiers.attack import Attack
from falsifiers.case import Case
from falsifiers.comparison import Comparison, compare_exactly, value_at_most
from falsifiers.fill import generator_for
from falsifiers.shapes import SHAPES

ENGINES = ("torch", "fused")
STEPS = {"cpu": 30, "cuda": 1000}
LENGTHS = 3
GIB = 2**30
LIMITS = {"torch": 4.0, "fused": 3.5}
"""GiB at most for a QLoRA step of a 0.5B model, 16 samples of 256 tokens. The first is what its card was said to need; the second is the
engine's that a GPU runs by default, which keeps less for the backward pass."""
SHAPE = SHAPES["qwen2.5-0.5b"]
BITS = 4.5 * 1.01
"""Half a byte a code, and a float32 for each 64 (Dettmers et al. 2023, §3); an allocator rounds each tensor up, 0.2 % in all here."""


def steps_keep_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """Steps on batches of a few lengths, each seen several times before: no byte more is live after them, or held in reserve."""
    kind = attack.subject.device.split(":")[0]
    found = []
    for engine in ENGINES if kind == "cuda" else ENGINES[:1]:
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
    return {"family": str(rng.choice(["llama", "qwen2", "qwen3"])), **sizes, **adapted, **run}


def step_stays_below(attack: Attack, case: Case) -> list[Comparison]:
    """The peak over loading the model with NF4 and training steps, by each engine, against its limit."""
    run = {"classes": 5, "rank": 16, "targets": "q_v", "nf4": True, "batch": 16, "seq": 256, "seed": int(case.seed) % 2**31}
    found = []
    for engine, limit in LIMITS.items():
        answer = attack.answer(case, scalars=SHAPE | run | {"engine": engine})
        found.append(value_at_most(f"{engine}: GiB at the peak", float(answer["peak"]) / GIB, limit))
        if engine == "torch":
            found.append(value_at_most("bits that stay a projection's weight", _bits(run, float(answer["resident"])), BITS))
    return found


def _bits(run: Mapping[str, Any], resident: float) -> float:
    """Bits of each weight of the projections, from the bytes of all weights; the others are plain, and LoRA and head in float32."""
    sizes = SimpleNamespace(**SHAPE, **run)
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    count = sizes.layers * sizes.hidden * (2 * queries + 2 * keys + 3 * sizes.intermediate)
    plain = sizes.hidden * (sizes.vocab + 2 * sizes.layers + 1) + sizes.layers * (queries + 2 * keys)
    trained = sizes.layers * sizes.rank * (2 * sizes.hidden + queries + keys) + sizes.classes * (sizes.hidden + 1)
    return float(8 * (resident - 2 * plain - 4 * trained) / count)
