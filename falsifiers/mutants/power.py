"""The kill matrix: every claim's own falsifier on its own default cases, against the correct subject and the mutants that it reaches.

What a case's expected answer and noise floor are does not depend on the subject, so that both are computed once for all mutants.
"""

import copy
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.contracts.model import Claim
from blackswan.falsifiers import mutants
from blackswan.falsifiers.numeric.attack import Attack, rounded_outputs
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.precision import CUDA_ONLY, UNIT_ROUNDOFF, signatures
from blackswan.falsifiers.runner.engine import Examination, Falsified, Options, Source, cases
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.runner.workers import answers
from blackswan.falsifiers.subjects.protocol import Lacks, Subject
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference import TABLE
from blackswan.reference.table import Operation

CALLED_BY_CHECK: Mapping[str, frozenset[str]] = {
    "zero_b_is_the_plain_layer": frozenset({"linear"}),
    "merged_equals_unmerged": frozenset({"linear", "lora_merge"}),
    "unmerge_undoes_merge": frozenset({"lora_unmerge"}),
    **dict.fromkeys(("nf4_error_within_half_a_gap", "nf4_mean_error_in_band", "nf4_requantises_to_itself"), frozenset({"nf4_dequantize"})),
    **dict.fromkeys(("nf4_keeps_zero", "nf4_mostly_not_zero"), frozenset({"nf4_dequantize"})),
}
"""Operations that a check asks the subject for beside the claim's own."""

TRAINING = ("train_steps", "multi_label_steps", "pretrain_steps")
DIFFERENTIATING_CHECKS = frozenset({"gradient_rows_sum_to_zero", "both_factors_receive_gradients", "gradients_of_large_arrays_row_by_row"})
ENOUGH = 30.0
"""An error of so many tolerances ends a cell, ten times what is asked of a mutant that a claim must catch. In bfloat16, where an error as
large as the answer is some hundred tolerances, a much larger number would send every such mutant through every case."""


@dataclass(frozen=True)
class Cell:
    """One claim in one dtype against one subject; `mutant` None is the correct one, and one of `honest` has to hold as well.

    `cases` counts those up to the first kill, or all; `power` is the largest error / tolerance; `looseness`, of a literal tolerance, is the
    median over the cases of tolerance / noise floor. `tensor` is what the first kill found wrong.
    """

    claim: str
    dtype: str
    mutant: str | None
    must_catch: bool
    state: str
    cases: int
    seconds: float
    power: float
    reason: str | None = None
    looseness: float | None = None
    tensor: str | None = None
    honest: bool = False

    @property
    def killed(self) -> bool:
        """Whether the claim reports the subject."""
        return self.state == State.FALSIFIED.value


@dataclass(frozen=True)
class Task:
    """The cells of one claim in one dtype, which share their cases; with None, the correct subject, honest ones are tried too."""

    claim: Claim
    dtype: str
    subjects: tuple[str | None, ...]


@dataclass
class RememberingAttack(Attack):
    """An attack that keeps what does not depend on the subject for all cases, which all mutants share."""

    def once(self, case: Case, what: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
        """A value that does not depend on the subject, computed once."""
        known = self.memory.setdefault(case.digest, {})
        if what not in known:
            known[what] = compute()
        return known[what]


def reachable_operations(claim: Claim) -> frozenset[str]:
    """The operations that the claim's falsifier runs on a subject."""
    own = {claim.operation} if claim.operation else set()
    return frozenset(own | mutants.USES.get(claim.operation or "", frozenset()) | CALLED_BY_CHECK.get(claim.check or "", frozenset()))


def _differentiates(claim: Claim) -> bool:
    return claim.kind == "gradient" or claim.operation in TRAINING or claim.check in DIFFERENTIATING_CHECKS


def _of_gradients_only(entry: mutants.Mutant) -> bool:
    made = entry.entry()
    return isinstance(made, Operation) and made.forward is getattr(TABLE.get(entry.operation), "forward", None)


def must_catch(claim: Claim) -> tuple[str, ...]:
    """The mutants that the claim names, and for a hyperparameter rule those of rules, where they change it.

    A rule that is the mutant that never reports is not let off: nothing can make it fail.
    """
    rule = claim.rule
    due = (name for name, entry in mutants.RULES.items() if rule is not None and (name == "rule_never_reports" or entry.make(rule) != rule))
    return (*claim.must_catch, *due)


def candidate_mutants(claim: Claim) -> list[str]:
    """The mutants to try on the claim: what it must catch first, then the others that its falsifier runs into.

    A claim on the shipped checkpoint, whose cases are large, is tried on what it must catch only.
    """
    due = list(must_catch(claim))
    if claim.domain.input == "checkpoint":
        return due
    operations = reachable_operations(claim)
    found = [entry for name, entry in mutants.MUTANTS.items() if entry.operation in operations and name not in due]
    return [*due, *(entry.name for entry in found if _differentiates(claim) or not _of_gradients_only(entry))]


def attack(claim: Claim, dtype: str, subjects: Sequence[str | None], source: Source | None = None) -> Iterator[Cell]:
    """The cells of one claim in one dtype, on the cases of the default run.

    What the claim compares has to kill: an answer with NaN leaves the claim of every check, which gives none of them power.
    """
    drawn = list(cases(claim, dtype, Options(shrink=False), source))
    memory: dict[str, dict[tuple[Any, ...], Any]] = {}
    for name in subjects:
        entry = mutants.MUTANTS.get(name or "")
        due = name in must_catch(claim) and not (entry and dtype in entry.hidden_in)
        attacked, changed = _against(claim, name)
        # Such a mutant may write into its inputs; the cases are shared.
        own = copy.deepcopy(drawn) if name in mutants.STEPS else drawn
        with mutants.applied(name if name in mutants.STEPS else None), _put_back():
            found = cell(RememberingAttack(changed, attacked, dtype, memory=memory, only_compared=True), own, name, due)
        yield replace(found, reason="the rule is this mutant itself") if name in mutants.RULES and changed.rule == claim.rule else found
    if None in subjects and claim.operation is not None:
        from blackswan.falsifiers.mutants import honest  # imports torch, which operation mutants do without

        for name in honest.names(claim):
            attack = RememberingAttack(claim, honest.subject(name), dtype, memory=memory, only_compared=True)
            yield replace(cell(attack, drawn, name, False), honest=True)


@contextmanager
def _put_back() -> Iterator[None]:
    """Functions of torch and of the system are afterwards what they were. A mutant that replaces one for a moment, and is asked by two
    threads at once, leaves it replaced, and later claims in this process would be asked with it."""
    torch = sys.modules.get("torch")  # most claims do without
    owners = [os, Path, *([torch, torch.Tensor, torch.nn.Module] if torch else [])]
    before = [(owner, dict(vars(owner))) for owner in owners]
    try:
        yield
    finally:
        for owner, was in before:
            for name, value in {**vars(owner)}.items():
                if name not in was and isinstance(owner, type):  # it hides what the class has inherited
                    delattr(owner, name)
                elif name in was and was[name] is not value:
                    setattr(owner, name, was[name])


def _against(claim: Claim, name: str | None) -> tuple[Subject, Claim]:
    """The subject of a cell, and the claim as it is attacked: a rule mutant changes the rule."""
    if name is not None and name not in mutants.RULES:
        return mutants.subject(name), claim
    if claim.rule is not None or claim.system:
        from blackswan.falsifiers.subjects.implementation import Implementation  # imports torch, which most claims do without here

        rule = mutants.RULES[name].make(claim.rule) if name is not None and claim.rule is not None else claim.rule
        return Implementation("cpu"), replace(claim, rule=rule)
    return ReferenceSubject(), claim


def cell(attack: RememberingAttack, drawn: Sequence[Case], name: str | None, due: bool) -> Cell:
    """Attacks the cases one by one: up to the first kill, or, for a mutant that is `due` to be caught, up to ENOUGH tolerances."""
    claim, start = attack.claim, time.perf_counter()
    if claim.operation is not None and (reason := attack.subject.unsupported(claim.operation, attack.dtype)):
        return Cell(claim.id, attack.dtype, name, due, State.NOT_RUN.value, 0, 0.0, 0.0, reason)
    examination, first, tensor = Examination(attack), 0, None
    for number, case in enumerate(drawn, start=1):
        try:
            examination.case(case)
        except Falsified as falsified:
            if not first:
                first, reason, tensor = number, str(falsified), falsified.comparison.where
            if not due or falsified.comparison.headroom >= ENOUGH:
                break
        except Lacks as lacking:
            return Cell(claim.id, attack.dtype, name, due, State.NOT_RUN.value, 0, 0.0, 0.0, str(lacking))
    tally = examination.tally
    state = State.FALSIFIED if first else State.HELD if tally.compared and not examination.stopped else State.VACUOUS
    reason = reason if first else examination.stopped
    literal = claim.operation is not None and claim.tolerance is not None and claim.tolerance.basis == "literal"
    loose = looseness(attack, drawn) if name is None and literal else None
    power = tally.worst.headroom if tally.worst else 0.0
    spent = time.perf_counter() - start
    return Cell(claim.id, attack.dtype, name, due, state.value, first or tally.run, spent, power, reason, loose, tensor)


def looseness(attack: Attack, drawn: Sequence[Case]) -> float:
    """The median over the cases of a literal tolerance over the noise floor of the operation's outputs."""
    tolerance, ratios = attack.tolerance, []
    for case in drawn:
        expected = attack.expect(case)
        for name, floor in attack.floor(case, rounded_outputs(case), expected).items():
            size = float(np.max(np.abs(expected[name]), initial=0.0))
            ulp = 2 * UNIT_ROUNDOFF["float32"]
            limit = float(tolerance.value or 0.0) * {"absolute": 1.0, "relative": size, "ulp": ulp * size}[tolerance.unit or "absolute"]
            if floor.max > 0:
                ratios.append(limit / floor.max)
    return float(np.median(ratios)) if ratios else 0.0


def work(task: Task) -> list[Cell]:
    """A task in a process of its own."""
    from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
    from blackswan.falsifiers.runner.real_input import RealInput

    source = RealInput(CHECKPOINT, CORPUS_HELDOUT).case if task.claim.domain.input == "checkpoint" else None
    return list(attack(task.claim, task.dtype, task.subjects, source))


def first_tasks(claims: Sequence[Claim], every: bool, only: Sequence[str] = ()) -> list[Task]:
    """The correct subject and what must be caught; for a claim on an elementary operation, or with `every`, all that it reaches."""
    tasks = []
    for claim in claims:
        signature = signatures()[claim.operation] if claim.operation is not None else None
        elementary = signature is not None and not signature.composition
        names = candidate_mutants(claim) if every or elementary or claim.rule is not None else list(must_catch(claim))
        chosen = [name for name in names if not only or name in only]
        if chosen or not only:
            tasks += [Task(claim, dtype, (None, *chosen)) for dtype in _dtypes(claim)]
    return _longest_first(tasks)


def further_tasks(claims: Sequence[Claim], found: Iterable[Cell]) -> list[Task]:
    """Tasks for mutants that nobody killed, on claims not tried yet; and for all mutants, on claims that killed none."""
    found = list(found)
    tried = {(each.claim, each.mutant) for each in found}
    dead = {each.mutant for each in found if each.killed}
    deadly = {each.claim for each in found if each.killed}
    tasks = []
    for claim in claims:
        names = [
            name for name in candidate_mutants(claim) if (claim.id, name) not in tried and (name not in dead or claim.id not in deadly)
        ]
        tasks += [Task(claim, dtype, tuple(names)) for dtype in _dtypes(claim) if names]
    return _longest_first(tasks)


def _dtypes(claim: Claim) -> list[str]:
    """The claim's dtypes that the CPU has: mutants run there."""
    return [dtype for dtype in claim.domain.dtype if dtype not in CUDA_ONLY]


def _longest_first(tasks: Iterable[Task]) -> list[Task]:
    def weight(task: Task) -> float:
        operation = task.claim.operation or ""
        sizes = dict.fromkeys(TRAINING, 20) | {"classifier_loss": 5, "language_model_loss": 4}
        size = 20 if task.claim.system else sizes.get(operation, 2 if operation.endswith("_forward") else 1)
        return -size * len(task.subjects) * (3 if task.claim.domain.input == "checkpoint" else 1)

    return sorted(tasks, key=weight)


def run(tasks: Sequence[Task], processes: int) -> Iterator[list[Cell]]:
    """The cells of each task, as they are done."""
    if processes < 2 or len(tasks) < 2:
        yield from map(work, tasks)
        return
    yield from answers([partial(work, task) for task in tasks], processes)
