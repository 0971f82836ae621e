"""The engine: draws cases from a claim's domain, attacks the subject with each, shrinks what falsifies it, and gives the verdict."""

import hashlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.errors import Flaky, Unsatisfiable

from blackswan.contracts.conventions import Declaration, alternatives
from blackswan.contracts.model import Claim, Range
from blackswan.falsifiers.numeric.answers import SubjectError, raised
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.kinds import KINDS
from blackswan.falsifiers.numeric.precision import Declared, declaration, is_narrow, signatures
from blackswan.falsifiers.numeric.strategies import Draw, boundaries, build, draws
from blackswan.falsifiers.runner.verdict import State, Tally, Verdict
from blackswan.falsifiers.subjects.memory import short_of_memory
from blackswan.falsifiers.subjects.protocol import Lacks, Subject, asked_by
from blackswan.falsifiers.system.trial import Trial

CASES = {"quick": 6, "default": 20, "deep": 1000}
"""Seeds a claim; each runs in every flavour. A claim's own `cases` replaces the default and scales the others."""

QUESTIONS = 3
"""So many of the last questions to a subject stand in the verdict of a claim about a system."""

FEW = 3
"""Seeds that a claim gets where an emulator, a thousand times slower than a device, computes the answers."""

SEEDS_OF_A_DRAW = 2
"""An elementary operation runs faster than Hypothesis draws its sizes, so each draw of sizes gets this many seeds."""

SEEDS_OF_AN_ATTEMPT = 4
"""So many problems are drawn at most for each attempt at a system claim, where the subject lacks what some of them need."""

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


Source = Callable[[Claim, Draw, str, str], Case]
"""Makes the case of a claim from a draw and a flavour, in a dtype."""


@dataclass(frozen=True)
class Options:
    """The strength of an attack: effort, the run's seed, and whether to stop at the first falsifying case instead of shrinking it."""

    effort: str = "default"
    seed: int = 0
    shrink: bool = True
    examples: int | None = None

    def examples_for(self, claim: Claim) -> int:
        """The number of examples that Hypothesis draws."""
        return -(-self.cases(claim) // len(same_sizes(claim, Draw({}, {}))))

    def cases(self, claim: Claim) -> int:
        """The number of seeds that the claim gets."""
        if self.examples is not None:
            return self.examples
        default = claim.cases or CASES["default"]
        if self.effort == "deep":
            return CASES["deep"]
        return default if self.effort == "default" else max(1, default * CASES["quick"] // CASES["default"])


def same_sizes(claim: Claim, draw: Draw) -> list[Draw]:
    """The draw, and for an elementary operation the same sizes with further seeds and one other scalar.

    A subject that keeps something by the sizes, or by some of the scalars, gives a stale answer there.
    """
    if not _elementary(claim) or claim.domain.input != "generated":
        return [draw]
    further = (replace(draw, seed=draw.seed + step, scalars=_one_other(claim, draw, step)) for step in range(1, SEEDS_OF_A_DRAW))
    return [draw, *further]


def _one_other(claim: Claim, draw: Draw, step: int) -> Mapping[str, Any]:
    """The draw's scalars with the next choice of one of them, where the domain lists choices; which one, the seed says."""
    listed = {name: choices for name, choices in claim.domain.scalars.items() if not isinstance(choices, Range)}
    able = [name for name, choices in listed.items() if len(choices) > 1 and draw.scalars.get(name) in choices]
    if not able:
        return draw.scalars
    name = able[draw.seed % len(able)]
    choices = list(listed[name])
    return {**draw.scalars, name: choices[(choices.index(draw.scalars[name]) + step) % len(choices)]}


def _elementary(claim: Claim) -> bool:
    return claim.operation is not None and not signatures()[claim.operation].composition


def own_seed(claim: Claim, dtype: str, seed: int) -> int:
    """A seed of the claim's own, so that no two claims draw the same examples."""
    return int.from_bytes(hashlib.sha256(f"{claim.id}:{dtype}:{seed}".encode()).digest()[:8], "big")


@dataclass(frozen=True)
class Drawing:
    """The cases of a claim in a dtype, as draws with a flavour: named ones first, then what Hypothesis draws of the domain."""

    claim: Claim
    dtype: str
    options: Options
    source: Source | None = None

    def build(self, draw: Draw, flavour: str) -> Case:
        """The case of a draw, generated or from real input."""
        return (self.source or build)(self.claim, draw, flavour, self.dtype)

    def first(self, times: int = 1) -> Iterator[tuple[Draw, str]]:
        """The boundary cases; of a system claim, which has no sizes to draw or to shrink, its attempts, one a seed, so many times."""
        seed = own_seed(self.claim, self.dtype, self.options.seed) % 2**31
        if self.claim.system:
            yield from ((Draw({}, {}, seed=seed + index), "normal") for index in range(times * self.options.cases(self.claim)))
        for draw, flavour in boundaries(self.claim, seed):
            yield from ((seeded, flavour) for seeded in same_sizes(self.claim, draw))

    def of(self, draw: Draw) -> list[tuple[Draw, str]]:
        """A draw in each flavour, the plainest first."""
        return [(seeded, flavour) for seeded in same_sizes(self.claim, draw) for flavour in self.claim.domain.flavours]

    def search(self, phases: Sequence[Phase], examine: Callable[[Draw], None], small: bool = False) -> None:
        """Calls `examine` with every draw that Hypothesis makes of the domain, `small` ones where asked for."""

        @hypothesis.seed(own_seed(self.claim, self.dtype, self.options.seed))
        @hypothesis.settings(
            max_examples=self.options.examples_for(self.claim),
            database=None,
            deadline=None,
            derandomize=False,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=Verbosity.quiet,
        )
        @hypothesis.given(draws(self.claim, small, self.options.seed))
        def attack(draw: Draw) -> None:
            examine(draw)

        attack()


class Examination:
    """Attacks cases one by one and keeps the tally; raises Falsified at the first that leaves the claim."""

    def __init__(self, attack: Attack) -> None:
        self.attack, self.tally, self.compare = attack, Tally(), comparing(attack.claim)
        self.stopped: str | None = None
        self.lacking: str | None = None
        self.last: Falsified | None = None

    def case(self, case: Case) -> None:
        """One case. A subject that raises where it had to answer has left the claim."""
        try:
            with self.attack.watch.on("subject" if self.attack.claim.system else "comparison"):  # less the stages inside it
                comparisons = self.compare(self.attack, case)
        except SubjectError as error:
            if _too_large(error, self.attack):
                self.lacking = f"case {case.digest} needs more memory than {self.attack.subject.device} has: {error.__cause__}"
                return
            comparisons = [raised(error)]
        except Lacks as lacking:
            self.tally.lacking, self.tally.reason = self.tally.lacking + 1, str(lacking)
            return
        except Exception as error:  # a reference or a check that breaks proves nothing about the subject, and must not pass for that
            self._stop(f"case {case.digest}", error)
            return
        self.tally.add(case, comparisons)
        worst = max((c for c in comparisons if not c.held), key=lambda c: c.headroom, default=None)
        if worst is not None:
            self.last = Falsified(case, worst)
            raise self.last

    def drawn(self, drawing: Drawing, draw: Draw, flavour: str) -> None:
        """The case of a draw in a flavour."""
        try:
            with self.attack.watch.on("drawing"):
                case = drawing.build(draw, flavour)
        except Exception as error:  # as above: a case that cannot be built proves nothing
            self._stop(f"{draw} in flavour {flavour}", error)
            return
        self.case(case)

    def _stop(self, what: str, error: Exception) -> None:
        at = traceback.extract_tb(error.__traceback__)[-1]
        self.stopped = self.stopped or f"the attack broke on {what}: {type(error).__name__}: {error} ({Path(at.filename).name}:{at.lineno})"

    def unfalsified(self) -> tuple[State, str | None]:
        """Held, unless the attack itself broke, lacked the memory for a case or compared nothing."""
        if self.stopped:
            return State.VACUOUS, self.stopped
        if self.lacking:
            return State.NOT_RUN, self.lacking
        tally = self.tally
        if tally.lacking and not tally.run:
            return State.NOT_RUN, tally.reason
        if not tally.compared:
            return State.VACUOUS, f"nothing was compared: the noise floor drowned the signal in all {tally.rejected} cases"
        return State.HELD, f"{tally.lacking} of {tally.run + tally.lacking} cases were not asked: {tally.reason}" if tally.lacking else None

    def verdict(self, state: State, reason: str | None, found: Falsified | None, start: float) -> Verdict:
        """The verdict of an attack that began at `start`."""
        attack, seconds = self.attack, {**self.attack.watch.seconds, "total": time.perf_counter() - start}
        case, comparison = (found.case, found.comparison) if found else (None, None)
        device = attack.subject.device
        if found and attack.asked and state is State.FALSIFIED:
            reason = f"asked {'; '.join(list(attack.asked.values())[-QUESTIONS:])}"
        return Verdict(attack.claim, attack.dtype, device, state, reason, self.tally, case, comparison, seconds=seconds)


def _too_large(error: SubjectError, attack: Attack) -> bool:
    """Whether a GPU was too small for the question. A claim about memory is falsified by that, and so is a subject on the host."""
    about_memory = (attack.claim.check or "").startswith("footprint.")
    return not about_memory and short_of_memory(error.__cause__, attack.subject.device)


def comparing(claim: Claim) -> Callable[[Attack, Case], list[Comparison]]:
    """The function that attacks the claim on a case; a system claim is attacked by one attempt."""
    if not claim.system:
        return KINDS[claim.kind]
    return lambda attack, case: Trial(attack, case.seed).run()


def falsify(
    claim: Claim, dtype: str, subject: Subject, options: Options, source: Source | None = None, assumed: Declared | None = None
) -> Verdict:
    """Attacks a claim in a dtype and gives the verdict. `source` builds cases of claims on real input; `assumed` stands for what the
    subject declares."""
    subject = asked_by(claim, subject)
    if subject.emulator and options.effort != "deep":
        options = replace(options, examples=FEW)
    if claim.operation is not None and (reason := subject.unsupported(claim.operation, dtype)):
        return Verdict(claim, dtype, subject.device, State.NOT_RUN, reason)
    start, found = time.perf_counter(), None
    attack = Attack(claim, subject, dtype, sparing=options.effort != "deep", assumed=assumed)  # a deep search is guided by the whole floor
    examination, drawing = Examination(attack), Drawing(claim, dtype, options, source)
    try:
        found = _first(examination, drawing)
        if not claim.system:
            found = _shrunk(examination, drawing) or found
    except Lacks as lacking:
        return Verdict(claim, dtype, subject.device, State.NOT_RUN, str(lacking))
    except (Flaky, Unsteady):
        reason = "the subject answered differently the second time on the same case"
        return examination.verdict(State.FLAKY, reason, examination.last, start)
    except Unsatisfiable:
        if found is None:
            return examination.verdict(State.VACUOUS, "no case of the domain could be drawn", None, start)
    state, reason = (State.FALSIFIED, None) if found else examination.unfalsified()
    return examination.verdict(state, reason, found, start)


def would_hold_with(claim: Claim, case: Case, subject: Subject, options: Options, source: Source | None = None) -> Declaration | None:
    """What a subject that declares nothing would have to declare for the claim to hold, on its counterexample and on all default cases.

    None where nothing helps, and for a composition, whose operations declare for themselves.
    """
    if claim.operation is None or signatures()[claim.operation].composition or declaration(subject, claim.operation):
        return None
    full = replace(options, effort="deep" if options.effort == "deep" else "default", shrink=False)
    for alternative in alternatives(signatures()[claim.operation], is_narrow(case.dtype)):
        assumed = {claim.operation: alternative}
        if replay(claim, case, subject, assumed).state in (State.FALSIFIED, State.NOT_RUN):
            continue
        if falsify(claim, case.dtype, subject, full, source, assumed).state is State.HELD:
            return alternative
    return None


def replay(claim: Claim, case: Case, subject: Subject, assumed: Declared | None = None) -> Verdict:
    """Attacks one stored case."""
    start = time.perf_counter()
    examination = Examination(Attack(claim, asked_by(claim, subject), case.dtype, assumed=assumed))
    try:
        examination.case(case)
    except Falsified as falsified:
        return examination.verdict(State.FALSIFIED, None, falsified, start)
    return examination.verdict(*examination.unfalsified(), None, start)


def _first(examination: Examination, drawing: Drawing) -> Falsified | None:
    """The first of the claim's first cases that falsifies it, attacked twice, as Hypothesis does with its draws.

    For each attempt at a system claim that the subject lacks something for there is a further one, up to a limit.
    """
    for index, (draw, flavour) in enumerate(drawing.first(SEEDS_OF_AN_ATTEMPT)):
        if drawing.claim.system and index - examination.tally.lacking >= drawing.options.cases(drawing.claim):
            break
        try:
            examination.drawn(drawing, draw, flavour)
        except Falsified as falsified:
            try:
                examination.case(falsified.case)
            except Falsified as again:
                return again
            if examination.lacking:
                return falsified
            raise Unsteady from None
    return None


def _shrunk(examination: Examination, drawing: Drawing) -> Falsified | None:
    """The smallest draw that falsifies the claim; a deep search is guided by the headroom.

    Shrinking gets a few seconds, after which only draws known to fail still do.
    """
    failing, deadline, deep = set[str](), float("inf"), drawing.options.effort == "deep"

    def examine(draw: Draw) -> None:
        nonlocal deadline
        late = time.perf_counter() > deadline
        if late and draw.key not in failing:
            return
        try:
            for seeded, flavour in drawing.of(draw):
                examination.drawn(drawing, seeded, flavour)
        except Falsified:
            deadline = deadline if failing else time.perf_counter() + SHRINK_SECONDS
            failing.add(draw.key)
            raise
        worst = examination.tally.worst
        if deep and not late and worst is not None and worst.headroom < float("inf"):
            hypothesis.target(worst.headroom)

    phases = [Phase.generate, *([Phase.target] if deep else []), *([Phase.shrink] if deep or drawing.options.shrink else [])]
    try:
        drawing.search(phases, examine)
    except Falsified as falsified:
        return falsified
    return None


def cases(claim: Claim, dtype: str, options: Options, source: Source | None = None) -> Iterator[Case]:
    """The cases that `falsify` attacks, in its order, for a subject that holds on all of them."""
    drawing, found = Drawing(claim, dtype, options, source), list[Draw]()
    yield from (drawing.build(draw, flavour) for draw, flavour in drawing.first())
    if not claim.system:
        drawing.search([Phase.generate], found.append)
    for draw in found:
        yield from (drawing.build(seeded, flavour) for seeded, flavour in drawing.of(draw))


def search(claim: Claim, dtype: str, options: Options, measure: Callable[[Case], float], source: Source | None = None) -> None:
    """Calls `measure` with the cases of `falsify`, the draws guided to where it is large, as a deep attack's are to its headroom.

    For an elementary operation many small cases follow: an error of few numbers is the largest beside its noise, and shrinking looks there.
    """
    drawing = Drawing(claim, dtype, options, source)
    for draw, flavour in drawing.first():
        measure(drawing.build(draw, flavour))

    def examine(draw: Draw) -> None:
        largest = max(measure(drawing.build(seeded, flavour)) for seeded, flavour in drawing.of(draw))
        if largest < float("inf"):
            hypothesis.target(largest)

    phases = [Phase.generate, Phase.target]
    if not claim.system:
        drawing.search(phases, examine)
    if _elementary(claim):
        many = replace(options, examples=SMALL * options.cases(claim))
        replace(drawing, options=many).search(phases, examine, small=True)
