"""Who is to blame for a falsified claim: the first call of the subject's traces that is wrong, and the mutant that errs likewise.

Whatever the claim asked of the subject on the case is asked again with the calls recorded. Each call is held to the reference on the call's
own inputs, so an error does not travel (`local`), and what it reads to the reference's tape (`trace_check`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from blackswan import reference
from blackswan.contracts.model import Claim
from blackswan.falsifiers.diagnosis.local import Local, Suspicion
from blackswan.falsifiers.diagnosis.mutant_match import Question, find, find_in_call, questions
from blackswan.falsifiers.diagnosis.run_failures import not_averaged, place
from blackswan.falsifiers.diagnosis.suspects import NAMED, failures_like, suspects, suspects_among
from blackswan.falsifiers.diagnosis.trace_check import NOT_CALLED, Section, Trace, same
from blackswan.falsifiers.diagnosis.tracing import executed
from blackswan.falsifiers.diagnosis.training_trace import Training
from blackswan.falsifiers.mutants import MUTANTS
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.precision import declared_by, signatures
from blackswan.falsifiers.numeric.whole_model import WholeModel, by_layer, chosen
from blackswan.falsifiers.runner.verdict import Culprit
from blackswan.falsifiers.subjects.doors.models import Model
from blackswan.falsifiers.subjects.protocol import Interrupted, Subject, TracedCall
from blackswan.falsifiers.system.trial import Trial

TRAINING = ("train_steps", "multi_label_steps")
UNTRACED = ("pretrain_steps",)
"""Micro-batches add up inside automatic differentiation: the answers tell what is wrong, the calls do not."""

CLEAR = 10.0
"""Times its limit that a call's error is beyond doubt."""


def diagnose(
    claim: Claim, case: Case, comparison: Comparison | None, subject: Subject, left_out: Collection[str] = (), changed: Collection[str] = ()
) -> Culprit | None:
    """The culprit of a falsified claim on a case; mutants in `left_out` are not tried. None for a claim without a reference.

    Which of the functions of `impl` that are `changed` run, the culprit says too.
    """
    if (claim.check or "").startswith("whole_models.") and comparison is not None:
        return _in_a_layer(claim, case, comparison, subject)
    if claim.operation is None:
        if comparison is None:
            return None
        if subject.name == "impl" and claim.system:
            return _in_the_program(claim, case, comparison, subject, changed)
        return not_averaged(comparison) if (claim.check or "").startswith("runs.") else None
    with executed() as ran:
        asked = questions(claim, case, subject)
    found = first_clear(suspicions(claim, asked, subject))
    mutant, distance = find(claim, asked, subject, found.operation if found else claim.operation, left_out)
    if mutant is None and found is not None and found.call is not None:
        mutant, distance = find_in_call(claim, found.call, case, subject, left_out)
    if found is None:
        found = _unexplained(claim, comparison, mutant)
    culprit = Culprit(found.operation, found.path, found.explanation, mutant, distance)
    if subject.name != "impl":
        return culprit
    where = comparison.where if comparison else ""
    return replace(culprit, suspects=suspects(claim, where, ran)[: NAMED - 1], changed=suspects_among(changed, claim, where, ran))


def _in_the_program(claim: Claim, case: Case, comparison: Comparison, subject: Subject, changed: Collection[str]) -> Culprit | None:
    """The most suspicious of the functions that run while the claim is asked again, of all where none is seen to run; and the next ones."""
    ended = "no function of impl was called"
    with executed() as ran:
        try:
            Trial(Attack(claim, subject, case.dtype), case.seed).run()
        except (Exception, SystemExit) as error:  # to raise may be what is wrong
            ended = f"it raised {type(error).__name__}: {error}"
    if not (named := suspects(claim, comparison.where, ran or None)):
        return None
    why = failures_like(claim, comparison.where, named[0])
    why = why if ran else f"{why}; all functions are ranked, because when the claim was asked again {ended}"
    differ = suspects_among(changed, claim, comparison.where, ran)
    return Culprit(named[0], place(comparison.tensor), why, suspects=named[1:], changed=differ)


def first_clear(found: Iterator[Suspicion]) -> Suspicion | None:
    """The first that is clear; else the first: next to a wrong formula, a call that is a little outside its limit is noise."""
    doubtful: Suspicion | None = None
    for suspicion in found:
        if suspicion.times >= CLEAR:
            return suspicion
        doubtful = doubtful or suspicion
    return doubtful


def _unexplained(claim: Claim, comparison: Comparison | None, mutant: str | None) -> Suspicion:
    """The statement to make where no recorded call is found wrong."""
    operation = claim.operation or ""
    where = comparison.tensor if comparison else "its answer"
    if not signatures()[operation].composition:
        return Suspicion(operation, operation, f"{where} leaves the tolerance")
    if mutant is not None:
        return Suspicion(MUTANTS[mutant].operation, operation, "no call was found wrong by itself; the procedure around the calls is")
    inside = "its calls cannot be held to the reference" if operation in UNTRACED else "no recorded call was found wrong"
    return Suspicion(operation, operation, f"{where} leaves the tolerance; {inside}")


def suspicions(claim: Claim, asked: Sequence[Question], subject: Subject) -> Iterator[Suspicion]:
    """The wrong calls in the answers to the claim's questions, in the order of the computation; then operations that are always a little
    wrong."""
    judges = []
    for question in asked:
        case = question.case
        judges.append(local := Local(claim, subject, case.dtype, case.seed))
        if signatures()[case.operation].composition:
            yield from _composition(question, local)
        else:
            yield from _operation(question, local)
    for local in judges:
        yield from local.systematic_errors()
    if claim.kind == "determinism" and asked:
        yield from _unsteady(asked[0].case, subject)


def _operation(question: Question, local: Local) -> Iterator[Suspicion]:
    """An elementary operation, asked by itself, as a call of its own."""
    case, operation = question.case, question.case.operation
    answer = question.ask(local.subject)
    if answer is None:
        if _refused(question):
            return
        yield Suspicion(operation, operation, "raises where the reference answers")
    elif question.wrt is None:
        yield from local.results(TracedCall(operation, operation, case.inputs, case.scalars, answer))
    else:
        call = TracedCall(operation, operation, case.inputs, case.scalars, {}, answer, case.cotangents)
        yield from local.gradients(call, question.wrt)


def _refused(question: Question) -> bool:
    try:
        question.run(question.case.inputs, reference.TABLE)
    except (ValueError, FloatingPointError):
        return True
    return False


def _composition(question: Question, local: Local) -> Iterator[Suspicion]:
    """The wrong calls, then the wrong parts of the answer; where the subject raises, the first call that it did not get to."""
    case, subject, cause = question.case, local.subject, None
    try:
        calls = subject.record(case.operation, case.inputs, case.scalars, case.dtype, None if question.wrt is None else case.cotangents)
    except Interrupted as interrupted:
        calls, cause = list(interrupted.calls), interrupted.__cause__ or interrupted
    if cause is None and (case.operation in UNTRACED or not calls):  # fused layers make no calls
        return
    traced: Training | Section
    if case.operation in TRAINING:
        traced = Training(case, Trace(calls), local)
    else:
        traced = Section(reference.record(case.operation, case.inputs, case.scalars, local.table), Trace(calls), local)
    why = f"raises {type(cause).__name__}: {cause}"
    for suspicion in traced.forward():
        yield replace(suspicion, explanation=why) if cause and suspicion.explanation == NOT_CALLED else suspicion
    if cause is not None:
        yield Suspicion(case.operation, case.operation, why)
    elif question.wrt is not None and isinstance(traced, Section):
        yield from traced.backward(case.cotangents, [name.removeprefix("parameters/") for name in question.wrt])
    else:
        yield from traced.answers(question.ask(subject) or {}, question.floors(local.claim, subject, traced.tape.result()))


def _unsteady(case: Case, subject: Subject) -> Iterator[Suspicion]:
    """The calls that answer differently the second time."""
    first, second = (Trace(subject.record(case.operation, case.inputs, case.scalars, case.dtype)) for _ in range(2))
    for call in first.calls:
        again = second.at(call.path)
        if again is None or any(not same(value, again.outputs[name]) for name, value in call.outputs.items()):
            yield Suspicion(call.operation, call.path, "answers differently the second time")


def _in_a_layer(claim: Claim, case: Case, comparison: Comparison, subject: Subject) -> Culprit:
    """The first wrong call of the layer that the comparison names; the layer where it has no calls or none is wrong by itself."""
    label, _, tensor = comparison.tensor.partition(" ")
    path, why = _place(tensor), f"{tensor} is the first to leave its noise"
    whole = replace(chosen(claim, case.seed, subject.device), nf4=label.endswith("NF4"))
    if path in whole.blocks:
        dtype = "float64" if label.startswith("float64") else case.dtype
        calls = cast(Model, subject.door("models")).calls(whole, dtype, path)
        found = _in_layer_suspicions(whole, path, calls, Local(claim, subject, dtype, case.seed), backward=tensor.startswith("gradient/"))
        if calls and (clear := first_clear(found)):
            return Culprit(clear.operation, clear.path, clear.explanation)
        inside = "every call of the layer is right by itself" if calls else "these layers make no calls that could be held to the reference"
        why = f"{why}; {inside}"
    return Culprit("whole model", path, why)


def _place(tensor: str) -> str:
    """The path of the block that an output belongs to, or of what is above or below the blocks."""
    _, _, name = tensor.partition("/")
    return ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name or tensor


def _in_layer_suspicions(whole: WholeModel, path: str, calls: list[TracedCall], local: Local, backward: bool) -> Iterator[Suspicion]:
    """The wrong calls of the layer. The states and gradients that enter it are the subject's own: their errors are not the layer's."""
    by_path = {call.path: call for call in calls}
    first, last = by_path.get(f"{path}.input_layernorm"), by_path.get(f"{path}.mlp_residual")
    index = int(path.rpartition(".")[2])
    entering = first.inputs["x"] if first else np.zeros((whole.batch, whole.seq, whole.hidden))
    tape = by_layer(whole, declared=declared_by(local.subject)).block(index, np.asarray(entering, np.float64))
    section = Section(tape, Trace(calls), local, derived={"x": lambda: None, "positions": lambda: None})
    yield from section.forward()
    if backward and last is not None:
        wanted = [name for name in tape.values if name.endswith((".lora_A.weight", ".lora_B.weight"))]
        yield from section.backward({"y": last.cotangents.get("y", np.zeros_like(last.outputs["y"]))}, wanted)
