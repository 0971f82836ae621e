"""The order in which a model is opened on a device: first all is computed that it will compute, then its weights are put there."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from blackswan.falsifiers.numeric.comparison import Comparison, value_at_least, value_at_most
from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import small

VOCAB = 257
"""Tokens of a text's bytes and of padding."""
LENGTHS = (32, 5)
"""Tokens of a text at most: more than those of the small model, and fewer."""
FAILURES = (("rms_norm", ""), ("attention", ""), ("swiglu", "backward"), ("attention", "backward"))
"""Operations that fail in their forward or in their backward pass."""


ERRORS = (
    "RuntimeError",
    "FileNotFoundError",
    "ImportError",
    "AttributeError",
    "ValueError",
    "AssertionError",
    "NotImplementedError",
    "MemoryError",
)
"""What a compiler, a library or Triton raises where it is not there, or cannot do what is asked."""
NO_MEMORY = "OutOfMemoryError"
"""What torch raises where a device has no memory left, which may be tried again."""
OWN = "CompilationError"
"""Triton raises it where a kernel does not compile; it has no other base than Exception."""
ENDS = ("KeyboardInterrupt", "SystemExit")
"""They end a process, and are no failures of a computation."""


def kernels_come_before_weights(trial: Trial) -> Iterator[Comparison]:
    """Whatever a step and an answer compute was computed, in its dtype and widths, before the first weight was asked for.

    The decoder's step is of as many tokens as 16 divides, the classifier's of others. Where that fails, by whatever error, one of a
    compiler's own class too, no weight is asked for and the failure is said with its reason; where it is tried again, nothing of the first
    try is held then. That a weight cannot be read is no such failure. On a CPU nothing is computed before; there another kind of device is
    feigned as well. Samples have several labels, or classes weights, as numbers and as a word, and texts may be shorter than those that are
    computed before.
    """
    rng = trial.rng("warm-up")
    for kind, backend in (*(("classifier", backend) for backend in trial.trainer.backends), ("decoder", "torch")):
        work = replace(small(rng, trial.seed, nf4=bool(rng.integers(2))), vocab=VOCAB, seq=LENGTHS[0], layers=3, backend=backend)
        if kind == "classifier":
            work = replace(work, dtype=str(rng.choice(["float32", "bfloat16"])), targets=str(rng.choice(["q_v", "all"])))
        for settings, seq in zip(_settings(work, trial.seed) if kind == "classifier" else [{}], LENGTHS, strict=False):
            yield from _warm(trial, kind, replace(work, seq=seq), settings)
        # The hand-written layers' steps call no operation by name; answers do.
        possible = [failure for failure in FAILURES if backend != "fused" or not failure[1]]
        chosen = possible[int(rng.integers(len(possible)))]
        for error in (ERRORS[int(trial.rng(f"error of {kind}").integers(len(ERRORS)))], NO_MEMORY, OWN):
            yield from _refused(trial, kind, work, *chosen, error)
        for end in ENDS:
            yield from same(f"{kind}: {end} before the weights", end, trial.devices.opening(work, kind).interrupted("rms_norm", end))
        unreadable = trial.devices.opening(work, kind).unreadable()
        yield from same(f"{kind}: error of a weight that cannot be read", "OSError", unreadable)
        if not trial.on_gpu:
            cold = trial.devices.opening(work, kind)
            cold.open(feigned=False)
            yield from same(f"{kind}: computed before the weights on a CPU", [], cold.before())


def _settings(work: Workload, seed: int) -> list[dict[str, Any]]:
    weights = "balanced" if seed % 2 else tuple(1.0 + place for place in range(work.classes))
    return [{"multi_label": True}, {"class_weights": weights}]


def _warm(trial: Trial, kind: str, work: Workload, settings: dict[str, Any]) -> list[Comparison]:
    opening = trial.devices.opening(work, kind, **settings)
    opening.open()
    before, asked = opening.before(), opening.asked()
    late, label = sorted(set(opening.used()) - set(before)), f"{kind} ({work.backend}, {settings})"
    longest = value_at_most(f"{label}: tokens of a text", opening.longest(), work.seq)
    drawn = same(f"{label}: draws from the program's random numbers", False, opening.draws())
    return [
        *drawn,
        *same(f"{label}: computed only after the weights came", [], late),
        value_at_least(f"{label}: weights", len(asked), 1),
        longest,
    ]


def _refused(trial: Trial, kind: str, work: Workload, failing: str, passes: str, error: str) -> list[Comparison]:
    opening = trial.devices.opening(work, kind)
    label = f"{kind} ({work.backend}): {failing} fails {passes}".rstrip()
    reason = rf"cannot run on \w+.*{error}: .*{re.escape(failing)} does not compile.*no weight"
    refused = trial.refuses(f"{label}, {error}", lambda: opening.open(failing, passes, error), reason, "WarmUpFailed")
    held = same(f"{label}: held of what failed, when it is tried again", [], opening.still_held())
    return [refused, *same(f"{label}: weights asked for", [], opening.asked()), *held]
