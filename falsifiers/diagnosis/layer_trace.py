"""The layer of a whole model that is wrong, and in it the first call: its trace held to the reference's tape of that layer alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import numpy as np

from blackswan.contracts.model import Claim
from blackswan.falsifiers.diagnosis.local import Local, Suspicion
from blackswan.falsifiers.diagnosis.trace_check import Section, Trace
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.whole_model import WholeModel, chosen
from blackswan.falsifiers.numeric.whole_model_reference import by_layer
from blackswan.falsifiers.runner.verdict import Culprit
from blackswan.falsifiers.subjects.doors import Models
from blackswan.falsifiers.subjects.protocol import Subject, TracedCall

CLEAR = 10.0
"""Times its limit that a call's error is beyond doubt."""


def culprit(claim: Claim, case: Case, comparison: Comparison, subject: Subject) -> Culprit:
    """The first wrong call of the layer that the comparison names; the layer where it has no calls or none is wrong by itself."""
    label, _, tensor = comparison.tensor.partition(" ")
    path, what = _place(tensor), "whole model"
    plain = chosen(claim, case.seed, subject.device)
    whole = replace(plain, nf4=label.endswith("NF4"))
    if path not in whole.blocks:
        return Culprit(what, path, f"{tensor} is the first to leave its noise")
    dtype = "float64" if label.startswith("float64") else case.dtype
    calls = cast(Models, subject.door("models")).calls(whole, dtype, path)
    if not calls:
        return Culprit(
            what, path, f"{tensor} is the first to leave its noise; these layers make no calls that could be held to the reference"
        )
    found = list(_suspicions(whole, path, calls, Local(claim, subject, dtype, case.seed), backward=tensor.startswith("gradient/")))
    clear = next((each for each in found if each.times >= CLEAR), found[0] if found else None)
    if clear is None:
        return Culprit(what, path, f"{tensor} is the first to leave its noise; every call of the layer is right by itself")
    return Culprit(clear.operation, clear.path, clear.explanation)


def _place(tensor: str) -> str:
    """The path of the block that an output belongs to, or of what is above or below the blocks."""
    _, _, name = tensor.partition("/")
    return ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else name or tensor


def _suspicions(whole: WholeModel, path: str, calls: list[TracedCall], local: Local, backward: bool) -> Iterator[Suspicion]:
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
