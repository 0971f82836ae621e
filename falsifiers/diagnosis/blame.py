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
from blackswan.falsifiers.diagnosis.trace_check import NOT_CALLED, Section, Trace
from blackswan.falsifiers.diagnosis.training_trace import Training
from blackswan.falsifiers.mutants import MUTANTS
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.precision import is_real, signatures
from blackswan.falsifiers.numeric.whole_model import WholeModel, by_layer, chosen
from blackswan.falsifiers.runner.verdict import Culprit
from blackswan.falsifiers.subjects.doors import Models
from blackswan.falsifiers.subjects.protocol import Interrupted, Subject, TracedCall
from blackswan.reference.table import Array

CLEAR = 10.0
"""Times its limit that a call's error is beyond doubt."""


def diagnose(claim: Claim, case: Case, comparison: Comparison | None, subject: Subject, left_out: Collection[str] = ()) -> Culprit | None:
    """The culprit of a falsified claim on a case; mutants in `left_out` are not tried. None for a claim without a reference."""
    if (claim.check or "").startswith("whole_models.") and comparison is not None:
        return _in_a_layer(claim, case, comparison, subject)
    if claim.operation is None:
        return None
    asked = questions(claim, case, subject)
    found = _first(suspicions(claim, asked, subject))
    mutant, distance = find(claim, asked, subject, found.operation if found else claim.operation, left_out)
    if mutant is None and found is not None and found.call is not None:
        mutant, distance = find_in_call(claim, found.call, case, subject, left_out)
    if found is None:
        found = _unexplained(claim, comparison, mutant)
    return Culprit(found.operation, found.path, found.explanation, mutant, distance)


def _first(found: Iterator[Suspicion]) -> Suspicion | None:
    """The first that is clear; else the first: next to a wrong formula, a call that is a little outside its limit is noise."""
    doubtful: Suspicion | None = None
    for suspicion in found:
        if suspicion.times >= CLEAR:
            return suspicion
        doubtful = doubtful or suspicion
    return doubtful


def _unexplained(claim: Claim, comparison: Comparison | None, mutant: str | None) -> Suspicion:
    """What can be said where every recorded call is right by itself and reads what it should."""
    operation = claim.operation or ""
    where = comparison.tensor if comparison else "its answer"
    if not signatures()[operation].composition:
        return Suspicion(operation, operation, f"{where} leaves the tolerance")
    if mutant is not None:
        return Suspicion(MUTANTS[mutant].operation, operation, "every recorded call is right by itself; the procedure around them is not")
    return Suspicion(
        operation, operation, f"no operation is wrong by itself, and each reads what it should; yet {where} leaves the tolerance"
    )


def suspicions(claim: Claim, asked: Sequence[Question], subject: Subject) -> Iterator[Suspicion]:
    """What is wrong in the answers to what the claim asked, in the order of the computation; then what is a little wrong always."""
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
    case, subject = question.case, local.subject
    try:
        calls = subject.record(case.operation, case.inputs, case.scalars, case.dtype, None if question.wrt is None else case.cotangents)
    except Interrupted as interrupted:
        yield from _broken_off(question, local, interrupted)
        return
    trace = Trace(calls)
    if case.operation == "pretrain_steps":
        return  # its micro-batches add up inside automatic differentiation: the answers tell, its calls do not
    if case.operation in ("train_steps", "multi_label_steps"):
        training = Training(case, trace, local)
        yield from training.suspicions()
        yield from training.answers(question.ask(subject) or {}, question.floors(local.claim, subject, training.tape.result()))
        return
    section = Section(reference.record(case.operation, case.inputs, case.scalars), trace, local)
    yield from section.forward()
    if question.wrt is None:
        yield from section.answers(question.ask(subject) or {}, question.floors(local.claim, subject, section.tape.result()))
    else:
        yield from section.backward(case.cotangents, [name.removeprefix("parameters/") for name in question.wrt])


def _broken_off(question: Question, local: Local, interrupted: Interrupted) -> Iterator[Suspicion]:
    """What is wrong before the subject raises; else the first call of the reference that it did not get to."""
    case, trace = question.case, Trace(interrupted.calls)
    why = f"raises {type(interrupted.__cause__).__name__}: {interrupted.__cause__}"
    if case.operation in ("train_steps", "multi_label_steps"):
        found = Training(case, trace, local).suspicions()
    else:
        found = Section(reference.record(case.operation, case.inputs, case.scalars), trace, local).forward()
    for suspicion in found:
        yield replace(suspicion, explanation=why) if suspicion.explanation == NOT_CALLED else suspicion
    yield Suspicion(case.operation, case.operation, why)


def _unsteady(case: Case, subject: Subject) -> Iterator[Suspicion]:
    """The calls that answer differently the second time."""
    first, second = (Trace(subject.record(case.operation, case.inputs, case.scalars, case.dtype)) for _ in range(2))
    for call in first.calls:
        again = second.at(call.path)
        if again is None or any(not _identical(value, again.outputs[name]) for name, value in call.outputs.items()):
            yield Suspicion(call.operation, call.path, "answers differently the second time")


def _identical(one: Array, other: Array) -> bool:
    a, b = (np.asarray(value, np.float64) if is_real(value) else value for value in (one, other))
    return np.array_equal(a, b, equal_nan=is_real(one))


def _in_a_layer(claim: Claim, case: Case, comparison: Comparison, subject: Subject) -> Culprit:
    """The first wrong call of the layer that the comparison names; the layer where it has no calls or none is wrong by itself."""
    label, _, tensor = comparison.tensor.partition(" ")
    path, operation = _place(tensor), "whole model"
    plain = chosen(claim, case.seed, subject.device)
    whole = replace(plain, nf4=label.endswith("NF4"))
    if path not in whole.blocks:
        return Culprit(operation, path, f"{tensor} is the first to leave its noise")
    dtype = "float64" if label.startswith("float64") else case.dtype
    calls = cast(Models, subject.door("models")).calls(whole, dtype, path)
    if not calls:
        return Culprit(
            operation, path, f"{tensor} is the first to leave its noise; these layers make no calls that could be held to the reference"
        )
    found = list(_in_layer_suspicions(whole, path, calls, Local(claim, subject, dtype, case.seed), backward=tensor.startswith("gradient/")))
    clear = _first(iter(found))
    if clear is None:
        return Culprit(operation, path, f"{tensor} is the first to leave its noise; every call of the layer is right by itself")
    return Culprit(clear.operation, clear.path, clear.explanation)


def _place(tensor: str) -> str:
    """The path of the block that an output belongs to, or of what is above or below the blocks."""
    _, _, name = tensor.partition("/")
    return ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name or tensor


def _in_layer_suspicions(whole: WholeModel, path: str, calls: list[TracedCall], local: Local, backward: bool) -> Iterator[Suspicion]:
    """What is wrong in the layer. The states and gradients that enter it are the subject's own: their errors are not the layer's."""
    by_path = {call.path: call for call in calls}
    first, last = by_path.get(f"{path}.input_layernorm"), by_path.get(f"{path}.mlp_residual")
    index = int(path.rpartition(".")[2])
    entering = first.inputs["x"] if first else np.zeros((whole.batch, whole.seq, whole.hidden))
    tape = by_layer(whole).block(index, np.asarray(entering, np.float64))
    section = Section(tape, Trace(calls), local, derived={"x": lambda: None, "positions": lambda: None})
    yield from section.forward()
    if backward and last is not None:
        wanted = [name for name in tape.values if name.endswith((".lora_A.weight", ".lora_B.weight"))]
        yield from section.backward({"y": last.cotangents.get("y", np.zeros_like(last.outputs["y"]))}, wanted)
