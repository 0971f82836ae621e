"""How precise an answer is, entry by entry: a rounding too many hides in the noise of a case, and shows over thousands of entries."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack, rounded_gradients, rounded_outputs
from blackswan.falsifiers.numeric.case import Case, differentiable
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, compare, ratio, same_structure, value_at_most
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF, compute_dtype, gradient_dtypes, is_real, round_to, rounded_table
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.reference.table import Array, Arrays

Rounding = Callable[[Array], Array]
Answer = tuple[str, dict[str, Array], dict[str, Array], list[Comparison]]
"""Before the names of its tensors, what is expected, the answer, and what is wrong with its names, shapes and dtypes."""
SMALLEST = 2.0**-120
"""Numbers below it may be flushed to zero."""
OTHER_STEPS = 1.5
"""Formulas are written in other steps than the reference's, of which two add at most the error of a third."""


def rounded_once(attack: Attack, case: Case) -> list[Comparison]:
    """Every output and gradient that is stored is the exact one, rounded, but for the share `share` of its entries.

    Arithmetic in float32 gives another neighbour only where the exact value lies within a few of its roundings of a tie. Of an operation
    that `STORED` knows, an entry may also be that of exact arithmetic which rounds what has to be stored on the way.
    """
    if _rounds_each_step(attack):
        return _no_worse_than_steps(attack, case)
    share, found, stored = float(attack.claim.arguments["share"]), [], _stored(attack, case)
    for kind, expected, actual, wrong in _answers(attack, case):
        found += wrong
        for name in (name for name, value in actual.items() if value.dtype == STORAGE[attack.dtype] and not wrong):
            if not stored or name in stored:
                allowed = [round_to(expected[name], attack.dtype), *([stored[name]] if stored else [])]
                found.append(_share(f"{kind}{name}", allowed, np.asarray(actual[name], np.float64), share))
    return found


def _share(name: str, allowed: Sequence[Array], actual: Array, share: float) -> Comparison:
    """At most that share of entries that are none of the allowed ones, and what three standard deviations of a count add to it."""
    right = np.any([(value == actual) | (np.maximum(np.abs(value), np.abs(actual)) < SMALLEST) for value in allowed], axis=0)
    most = share * actual.size + 3 * np.sqrt(share * actual.size)
    return value_at_most(f"{name}: entries of {actual.size} that are not the exact ones rounded", int((~right).sum()), float(most))


def as_precise_as_stored(attack: Attack, case: Case) -> list[Comparison]:
    """The root mean square of the errors is at most `times` that of exact arithmetic which rounds what has to be stored on the way."""
    if _rounds_each_step(attack):
        return _no_worse_than_steps(attack, case)
    times, found, stored = float(attack.claim.arguments["times"]), [], _stored(attack, case)
    for kind, expected, actual, wrong in _answers(attack, case):
        found += wrong
        for name in () if wrong else expected:
            own, allowed = (Errors.of(np.asarray(value, np.float64) - expected[name]).rms for value in (actual[name], stored[name]))
            found.append(value_at_most(f"{kind}{name}: rms error, in those of exact arithmetic that stores", own / allowed, times))
    return found


def each_entry_is_right(attack: Attack, case: Case) -> list[Comparison]:
    """Every entry of outputs and gradients is right to `relative` and a rounding of its own size, however small it is beside the others.

    A cross-entropy is asked only for the gradients of the classes that are not the label. Its loss is the logarithm of a sum next to one,
    and the label's gradient is a probability next to one less one, so that both hold a rounding of one.
    """
    if _rounds_each_step(attack):
        raise Lacks(f"each step of {attack.claim.operation} is declared to be rounded, and small terms with it")
    relative, found = float(attack.claim.arguments["relative"]), list[Comparison]()
    labels = case.inputs.get("labels")
    for kind, expected, actual, wrong in _answers(attack, case):
        found += wrong
        for name, exact in expected.items() if not wrong else ():
            if labels is not None and not kind:
                continue
            others = np.ones(exact.shape, bool) if labels is None else np.arange(exact.shape[-1]) != labels[:, None]
            unit = UNIT_ROUNDOFF[str(actual[name].dtype)]
            size = np.maximum(np.abs(exact), SMALLEST / unit)[others] * (unit + relative)
            found.append(compare(f"{kind}{name} / bound", exact[others] / size, actual[name][others] / size, Errors.flat(1.0), unit))
    return found


def _rounds_each_step(attack: Attack) -> bool:
    """True where the subject declares that it rounds each step, and so more than once."""
    return attack.declared.get(attack.claim.operation or "", {}).get("intermediates") == "storage"


def _no_worse_than_steps(attack: Attack, case: Case) -> list[Comparison]:
    """The root mean square of the errors is that of the reference whose every step is rounded, or little more in another order of steps."""
    if any(output.order for output in attack.signature.outputs.values()):
        raise Lacks(
            f"each step of {attack.claim.operation} is declared to be rounded, and a probability that is next to its target with it"
        )
    table, found = rounded_table(attack.table, attack.dtype, declared=attack.declared), list[Comparison]()
    inputs = {name: value.astype(compute_dtype(attack.dtype)) if is_real(value) else value for name, value in case.inputs.items()}
    runs = rounded_outputs(case), rounded_gradients(case, differentiable(attack.signature, case))
    for (kind, expected, actual, wrong), run in zip(_answers(attack, case), runs, strict=False):
        found += wrong
        steps = {} if wrong else run(inputs, table)
        for name in (name for name in steps if actual[name].dtype == STORAGE[attack.dtype]):
            own, allowed = (Errors.of(np.asarray(value, np.float64) - expected[name]).rms for value in (actual[name], steps[name]))
            found.append(value_at_most(f"{kind}{name}: rms error, in those of rounded steps", ratio(own, allowed), OTHER_STEPS))
    return found


def _stored(attack: Attack, case: Case) -> dict[str, Array]:
    """The answers of exact arithmetic that rounds what the operation has to store on the way; none where it stores nothing."""
    model = STORED.get(case.operation)
    return model(case, lambda value: np.asarray(round_to(value, attack.dtype), np.float64)) if model else {}


def _answers(attack: Attack, case: Case) -> Iterator[Answer]:
    """The outputs, and the gradients where the operation has any."""
    expected, actual = attack.expect(case), attack.answer(case)
    yield "", expected, actual, same_structure(expected, actual, attack.dtypes(expected))
    if wrt := differentiable(attack.signature, case):
        dtypes = gradient_dtypes(attack.signature, case.scalars, wrt, attack.dtype)
        expected, actual = attack.expect_gradients(case, wrt), attack.answer_gradients(case, wrt)
        yield "gradient of ", expected, actual, same_structure(expected, actual, dtypes)


def _attention(case: Case, rounded: Rounding) -> dict[str, Array]:
    """The probabilities are stored on the way, and in the backward pass the gradients of the scores."""
    q, k, v = (case.inputs[name] for name in ("q", "k", "v"))
    seq, groups, scale = q.shape[1], q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    keys, values = (np.repeat(each, groups, axis=2) for each in (k, v))
    seen = np.tri(seq, dtype=bool) & case.inputs["mask"][:, None, None, :]  # [batch, 1, seq, seq]
    scores = np.where(seen, np.einsum("bihd,bjhd->bhij", q, keys) * scale, -np.inf)
    shift = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(shift), shift, 0.0))
    p = weights / np.maximum(weights.sum(axis=-1, keepdims=True), SMALLEST)
    y, dy = rounded(np.einsum("bhij,bjhd->bihd", rounded(p), values)), case.cotangents["y"]
    slope = p * (np.einsum("bihd,bjhd->bhij", dy, values) - np.einsum("bihd,bihd->bhi", dy, y)[..., None])
    dv = rounded(np.einsum("bhij,bihd->bjhd", rounded(p), dy))
    dq, dk = (
        rounded(np.einsum(f"bhij,b{j}hd->b{i}hd", rounded(slope), other) * scale) for i, j, other in (("i", "j", keys), ("j", "i", q))
    )
    summed = (rounded(each.reshape(*k.shape[:3], groups, -1).sum(axis=3)) for each in (dk, dv))
    return {"y": y, "q": dq, **dict(zip(("k", "v"), summed, strict=True))}


def _lora_linear(case: Case, rounded: Rounding) -> dict[str, Array]:
    """The plain layer's result and the activations between the factors are stored on the way."""
    x, weight, a, b = (case.inputs[name] for name in ("x", "weight", "lora_a", "lora_b"))
    plain = rounded(x @ weight.T + case.inputs.get("bias", 0.0))
    return {"y": rounded(plain + case.scalars["alpha"] / len(a) * (rounded(x @ a.T) @ b.T))}


def _nf4_linear(case: Case, rounded: Rounding) -> dict[str, Array]:
    """The dequantised weight is stored on the way."""
    shape = {"rows": case.scalars["out_features"], "columns": case.scalars["in_features"], "block_size": case.scalars["block_size"]}
    stored: Arrays = {name: case.inputs[name] for name in ("codes", "absmax")}
    weight = rounded(reference.evaluate("nf4_dequantize", stored, shape)["weight"])
    return {"y": rounded(case.inputs["x"] @ weight.T + case.inputs.get("bias", 0.0)), "x": rounded(case.cotangents["y"] @ weight)}


STORED: dict[str, Callable[[Case, Rounding], dict[str, Array]]] = {
    "attention": _attention,
    "lora_linear": _lora_linear,
    "nf4_linear": _nf4_linear,
}
"""Outputs and gradients, by the name of the input, of exact arithmetic that rounds what has to be stored."""
