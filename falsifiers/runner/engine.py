"""The engine: draws cases from a claim's domain, attacks the subject with each, shrinks what falsifies it, and gives the verdict."""

import hashlib
import math
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.errors import Flaky, Unsatisfiable

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.answers import SubjectError, raised
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.kinds import KINDS
from blackswan.falsifiers.numeric.precision import signatures
from blackswan.falsifiers.numeric.strategies import Draw, boundaries, build, draws
from blackswan.falsifiers.runner.verdict import State, Tally, Verdict
from blackswan.falsifiers.subjects.doors import Lacks
from blackswan.falsifiers.subjects.protocol import Subject, asked_by
from blackswan.falsifiers.system.trial import Trial

CASES = {"quick": 6, "default": 20, "deep": 1000}
"""Seeds a claim; each runs in every flavour. A claim's own `cases` replaces the default and scales the others."""

SEEDS_OF_A_DRAW = 2
"""An elementary operation runs faster than Hypothesis draws its sizes, so each draw of sizes gets this many seeds."""

SHRINK_SECONDS = 5.0

SMALL = 4
"""Small draws of a calibration for each that is guided."""


class Falsified(Exception):  # noqa: N818  # a verdict on the way, not an error of the program
    """A case on which the subject left the claim."""

    def __init__(self, case: Case, comparison: Comparison) -> None:
        super().__init__(f"{comparison.tensor}: {comparison.reason or comparison.metric}")
        self.case, self.comparison = case, comparison


class Unsteady(Exception):  # noqa: N818  # a verdict on the way, not an error of the program
    """A case that falsified the claim, and did not when it was attacked again."""


@dataclass(frozen=True)
class Options:
    """How hard to attack: effort, the run's seed, and whether to stop at the first falsifying case instead of shrinking it."""

    effort: str = "default"
    seed: int = 0
    shrink: bool = True
    examples: int | None = None

    def examples_for(self, claim: Claim) -> int:
        """The number of examples that Hypothesis draws."""
        return -(-self._cases(claim) // len(same_sizes(claim, Draw({}, {}))))

    def _cases(self, claim: Claim) -> int:
        if self.examples is not None:
            return self.examples
        default = claim.cases or CASES["default"]
        if self.effort == "deep":
            return CASES["deep"]
        return default if self.effort == "default" else max(1, default * CASES["quick"] // CASES["default"])


def same_sizes(claim: Claim, draw: Draw) -> list[Draw]:
    """The draw, and for an elementary operation the same sizes with further seeds."""
    signature = signatures()[claim.operation] if claim.operation else None
    alone = signature is None or signature.composition or claim.domain.input != "generated"
    return [replace(draw, seed=draw.seed + step) for step in range(1 if alone else SEEDS_OF_A_DRAW)]


def own_seed(claim: Claim, dtype: str, seed: int) -> int:
    """A seed of the claim's own, so that no two claims draw the same examples."""
    return int.from_bytes(hashlib.sha256(f"{claim.id}:{dtype}:{seed}".encode()).digest()[:8], "big")


class Examination:
    """Attacks cases one by one and keeps the tally; raises Falsified at the first that leaves the claim."""

    def __init__(self, attack: Attack, source: "Source | None" = None) -> None:
        self.attack, self.tally, self.source = attack, Tally(), source
        self.compare = comparing(attack.claim)
        self.stopped: str | None = None
        self.last: Falsified | None = None

    def case(self, case: Case) -> None:
        """One case. A subject that raises where it had to answer has left the claim."""
        try:
            comparisons = self.compare(self.attack, case)
        except SubjectError as error:
            comparisons = [raised(error)]
        except Lacks:
            raise
        except Exception as error:  # a reference or a check that breaks proves nothing about the subject, and must not pass for that
            self._stop(f"case {case.digest}", error)
            return
        self.tally.add(case, comparisons)
        worst = max((c for c in comparisons if not c.held), key=lambda c: c.headroom, default=None)
        if worst is not None:
            self.last = Falsified(case, worst)
            raise self.last

    def _stop(self, what: str, error: Exception) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        self.stopped = self.stopped or f"the attack broke on {what}: {type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"

    def draw(self, draw: Draw, flavours: tuple[str, ...]) -> None:
        """The draw in each flavour, the plainest first."""
        for seeded in same_sizes(self.attack.claim, draw):
            for flavour in flavours:
                self._draw(seeded, flavour)

    def _draw(self, draw: Draw, flavour: str) -> None:
        try:
            with self.attack.watch.on("drawing"):
                case = self.build(draw, flavour)
        except Exception as error:  # as above: a case that cannot be built proves nothing
            self._stop(f"{draw} in flavour {flavour}", error)
            return
        self.case(case)

    def build(self, draw: Draw, flavour: str) -> Case:
        """The case of a draw, generated or from real input."""
        if self.source is not None:
            return self.source(self.attack.claim, draw, flavour, self.attack.dtype)
        return build(self.attack.claim, draw, flavour, self.attack.dtype)


Source = Callable[[Claim, Draw, str, str], Case]


def falsify(claim: Claim, dtype: str, subject: Subject, options: Options, source: Source | None = None) -> Verdict:
    """Attacks a claim in a dtype and gives the verdict. `source` builds cases of claims on real input."""
    subject = asked_by(claim, subject)
    if claim.operation is not None and (reason := subject.unsupported(claim.operation, dtype)):
        return Verdict(claim, dtype, subject.device, State.NOT_RUN, reason)
    start = time.perf_counter()
    examination = Examination(Attack(claim, subject, dtype), source)
    found: Falsified | None = None
    state, reason = State.HELD, None
    try:
        if claim.system:
            found = _seeds(examination, options)
        else:
            found = _boundaries(examination, options)
            found = _hypothesis(examination, options) or found
    except Lacks as lacking:
        return Verdict(claim, dtype, subject.device, State.NOT_RUN, str(lacking))
    except (Flaky, Unsteady):
        state, reason = State.FLAKY, "the subject answered differently the second time on the same case"
        found = examination.last
    except Unsatisfiable:
        state, reason = State.VACUOUS, "no case of the domain could be drawn"
    if found is not None and state is not State.FLAKY:
        state, reason = State.FALSIFIED, None
    elif state is State.HELD:
        state, reason = _unfalsified(examination)
    return _verdict(examination, state, reason, found, start)


def replay(claim: Claim, case: Case, subject: Subject) -> Verdict:
    """Attacks one stored case."""
    start = time.perf_counter()
    examination = Examination(Attack(claim, asked_by(claim, subject), case.dtype))
    try:
        examination.case(case)
    except Falsified as falsified:
        return _verdict(examination, State.FALSIFIED, None, falsified, start)
    return _verdict(examination, *_unfalsified(examination), None, start)


def _verdict(examination: Examination, state: State, reason: str | None, found: Falsified | None, start: float) -> Verdict:
    attack = examination.attack
    return Verdict(
        attack.claim,
        attack.dtype,
        attack.subject.device,
        state,
        reason,
        examination.tally,
        found.case if found else None,
        found.comparison if found else None,
        seconds={**attack.watch.seconds, "total": time.perf_counter() - start},
    )


def _unfalsified(examination: Examination) -> tuple[State, str | None]:
    """Held, unless the attack itself broke or compared nothing."""
    if examination.stopped:
        return State.VACUOUS, examination.stopped
    if not examination.tally.compared:
        return State.VACUOUS, f"nothing was compared: the noise floor drowned the signal in all {examination.tally.rejected} cases"
    return State.HELD, None


def comparing(claim: Claim) -> Callable[[Attack, Case], list[Comparison]]:
    """How the claim is attacked on a case."""
    return _try if claim.system else KINDS[claim.kind]


def _try(attack: Attack, case: Case) -> list[Comparison]:
    """One attempt at a system claim."""
    return Trial(attack.claim, attack.subject, case.seed, case.dtype, attack).run()


def _seeds(examination: Examination, options: Options) -> Falsified | None:
    """A system claim's attempts, one a seed: there are no sizes to draw or to shrink."""
    for case in cases(examination.attack.claim, examination.attack.dtype, options):
        try:
            examination.case(case)
        except Falsified as falsified:
            return _confirmed(examination, falsified)
    return None


def _boundaries(examination: Examination, options: Options) -> Falsified | None:
    claim = examination.attack.claim
    for draw, flavour in boundaries(claim, own_seed(claim, examination.attack.dtype, options.seed) % 2**31):
        try:
            examination.draw(draw, (flavour,))
        except Falsified as falsified:
            return _confirmed(examination, falsified)
    return None


def _confirmed(examination: Examination, found: Falsified) -> Falsified:
    """The same case again, as Hypothesis does with what it draws."""
    try:
        examination.case(found.case)
    except Falsified as again:
        return again
    raise Unsteady


def _hypothesis(examination: Examination, options: Options) -> Falsified | None:
    claim = examination.attack.claim
    phases: tuple[Phase, ...] = (Phase.generate, Phase.shrink) if options.shrink else (Phase.generate,)
    if options.effort == "deep":
        phases = (Phase.generate, Phase.target, Phase.shrink)
    budget = ShrinkBudget(examination, claim.domain.flavours, options.effort == "deep")
    try:
        _drawn(claim, examination.attack.dtype, options, phases, budget.examine)
    except Falsified as falsified:
        return falsified
    return None


def _drawn(
    claim: Claim,
    dtype: str,
    options: Options,
    phases: tuple[Phase, ...],
    examine: Callable[[Draw], None],
    small: bool = False,
) -> None:
    """Calls `examine` with every draw that Hypothesis makes of the claim's domain, `small` ones where asked for."""

    @hypothesis.seed(own_seed(claim, dtype, options.seed))
    @hypothesis.settings(
        max_examples=options.examples_for(claim),
        database=None,
        deadline=None,
        derandomize=False,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    @hypothesis.given(draws(claim, small, options.seed))
    def attack(draw: Draw) -> None:
        examine(draw)

    attack()


def cases(claim: Claim, dtype: str, options: Options, source: Source | None = None) -> Iterator[Case]:
    """The cases that `falsify` attacks, in its order, for a subject that holds on all of them."""
    if claim.system:
        first = own_seed(claim, dtype, options.seed) % 2**31
        yield from (Case("", dtype, {}, {}, first + index, "normal", {}) for index in range(options._cases(claim)))
        return
    yield from _boundary_cases(claim, dtype, options, source or build)
    found: list[Draw] = []
    _drawn(claim, dtype, options, (Phase.generate,), found.append)
    for draw in found:
        yield from _cases_of(claim, dtype, draw, source or build)


def search(claim: Claim, dtype: str, options: Options, measure: Callable[[Case], float], source: Source | None = None) -> None:
    """Calls `measure` with the cases of `falsify`, the draws guided to where it is large, as a deep attack's are to its headroom.

    Of an elementary operation follow many small cases: an error of few numbers is the largest beside its noise, and shrinking looks there.
    """
    if claim.system:
        for case in cases(claim, dtype, options):
            measure(case)
        return
    for case in _boundary_cases(claim, dtype, options, source or build):
        measure(case)

    def examine(draw: Draw) -> None:
        largest = max(measure(case) for case in _cases_of(claim, dtype, draw, source or build))
        if math.isfinite(largest):
            hypothesis.target(largest)

    _drawn(claim, dtype, options, (Phase.generate, Phase.target), examine)
    if claim.operation is not None and not signatures()[claim.operation].composition:
        many = replace(options, examples=SMALL * options._cases(claim))
        _drawn(claim, dtype, many, (Phase.generate, Phase.target), examine, small=True)


def _boundary_cases(claim: Claim, dtype: str, options: Options, make: "Source") -> Iterator[Case]:
    for draw, flavour in boundaries(claim, own_seed(claim, dtype, options.seed) % 2**31):
        for seeded in same_sizes(claim, draw):
            yield make(claim, seeded, flavour, dtype)


def _cases_of(claim: Claim, dtype: str, draw: Draw, make: "Source") -> Iterator[Case]:
    for seeded in same_sizes(claim, draw):
        for flavour in claim.domain.flavours:
            yield make(claim, seeded, flavour, dtype)


class ShrinkBudget:
    """Examines draws; once the first one fails, shrinking gets a few seconds, after which only draws known to fail still do."""

    def __init__(self, examination: Examination, flavours: tuple[str, ...], target: bool) -> None:
        self.examination, self.flavours, self.target = examination, flavours, target
        self.failing: dict[str, Falsified] = {}
        self.deadline = float("inf")

    def examine(self, draw: Draw) -> None:
        """Raises Falsified where the draw leaves the claim; the claim's headroom guides a deep search."""
        if time.perf_counter() > self.deadline:
            if draw.key in self.failing:
                self.examination.draw(draw, self.flavours)
            return
        try:
            self.examination.draw(draw, self.flavours)
        except Falsified as falsified:
            if not self.failing:
                self.deadline = time.perf_counter() + SHRINK_SECONDS
            self.failing[draw.key] = falsified
            raise
        if self.target:
            self._guide()

    def _guide(self) -> None:
        worst: Any = self.examination.tally.worst
        if worst is not None and worst.headroom < float("inf"):
            hypothesis.target(worst.headroom)


def attackable(claim: Claim) -> bool:
    """Whether the claim attacks an operation (rules are attacked through their own engine)."""
    return claim.system or (claim.kind != "rule" and claim.operation in signatures())
