"""The noise floor: rounding neither accumulates in the storage dtype, nor leaves float32 unseen, nor makes noise where there is none."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from falsifiers_claims import claim

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.comparison import Errors
from blackswan.falsifiers.numeric.precision import (
    STORAGE,
    UNIT_ROUNDOFF,
    compute_dtype,
    held_dtype,
    is_real,
    round_to,
    rounded_table,
    signatures,
)
from blackswan.falsifiers.numeric.rounding import dithered, moved, nearest, to_tf32
from blackswan.falsifiers.numeric.strategies import Draw, build
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reference.table import Array, Operation

NARROW = ("float32", "bfloat16", "float16")
INPUTS: dict[str, dict[str, Any]] = {
    "linear": {"x": (3, 8), "weight": (5, 8), "bias": (5,)},
    "rms_norm": {"x": (3, 8), "weight": (8,)},
    "softmax": {"x": (3, 8)},
    "swiglu": {"gate": (3, 8), "up": (3, 8)},
    "residual_add": {"x": (3, 8), "branch": (3, 8)},
}
SCALARS: dict[str, dict[str, Any]] = {"rms_norm": {"eps": 1e-6}}


def drawn(operation: str, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in INPUTS[operation].items()}


def ran(operation: str, inputs: dict[str, Array], dtype: str, replay: np.random.Generator | None = None) -> Array:
    given = {name: value.astype(compute_dtype(dtype)) for name, value in inputs.items()}
    table = rounded_table(reference.TABLE, dtype, replay)
    return np.asarray(reference.evaluate(operation, given, SCALARS.get(operation, {}), table)["y"])


@pytest.mark.parametrize("operation", sorted(INPUTS))
def test_float64_is_the_oracle_itself(operation: str) -> None:
    inputs = drawn(operation)
    exact = reference.evaluate(operation, inputs, SCALARS.get(operation, {}))["y"]
    np.testing.assert_array_equal(ran(operation, inputs, "float64"), exact)
    assert ran(operation, inputs, "float64").dtype == np.float64


def test_every_operation_of_the_table_is_the_oracle_in_float64_forward_and_backward() -> None:
    rounded = rounded_table(reference.TABLE, "float64")
    x, weight, dy = (np.random.default_rng(seed).standard_normal((4, 6)) for seed in range(3))
    for name, arguments in {"linear": {"x": x, "weight": weight, "bias": None}, "swiglu": {"gate": x, "up": weight}}.items():
        upstream = dy[:, :4] if name == "linear" else dy
        plain, wrapped = reference.TABLE[name], rounded[name]
        for given, want in zip(
            wrapped.gradients([upstream], arguments, ["x", "weight", "gate", "up"]).items(),
            plain.gradients([upstream], arguments, ["x", "weight", "gate", "up"]).items(),
            strict=True,
        ):
            assert given[0] == want[0]
            np.testing.assert_array_equal(given[1], want[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_thousand_ones_sum_to_a_thousand(dtype: str) -> None:
    ones = {"x": np.ones((1, 1000)), "weight": np.ones((1, 1000))}
    assert ran("linear", ones, dtype) == 1000.0
    narrow = ReferenceSubject().run("linear", ones, {}, dtype)["y"]
    assert narrow.dtype == STORAGE[dtype]
    assert float(narrow[0, 0]) == 1000.0


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("replayed", [False, True])
def test_results_are_numbers_that_the_dtype_holds(dtype: str, replayed: bool) -> None:
    for operation in INPUTS:
        y = ran(operation, drawn(operation), dtype, np.random.default_rng(0) if replayed else None)
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y, y.astype(STORAGE[dtype]).astype(np.float32))


@pytest.mark.parametrize("dtype", NARROW)
def test_a_constant_of_float64_is_found(dtype: str) -> None:
    def leaves(x: Array) -> Array:
        return x * np.array([2.0])

    with np.errstate(all="ignore"), pytest.raises(TypeError, match="softmax left float32 for float64"):
        rounded_table({"softmax": Operation(leaves)}, dtype)["softmax"].run({"x": np.ones((2, 3), np.float32)})  # type: ignore[union-attr]


def test_a_backward_pass_that_leaves_float32_is_found() -> None:
    def backward(dy: Array, x: Array) -> dict[str, Array]:
        return {"x": dy * x * np.float64(2.0)}

    table = rounded_table({"softmax": Operation(lambda x: x, backward)}, "float32")
    with pytest.raises(TypeError, match="float64"):
        table["softmax"].gradients([np.ones((2, 3), np.float32)], {"x": np.ones((2, 3), np.float32)}, ["x"])  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("operation", ["linear", "rms_norm", "swiglu", "softmax"])
def test_replays_differ_and_are_of_the_size_of_the_rounding(operation: str, dtype: str) -> None:
    inputs = {name: np.asarray(round_to(value, dtype), np.float64) for name, value in drawn(operation).items()}
    exact = reference.evaluate(operation, inputs, SCALARS.get(operation, {}))["y"]
    answers = [ran(operation, inputs, dtype, np.random.default_rng(seed)) for seed in range(8)]
    if dtype == "float32":
        assert len({answer.tobytes() for answer in answers}) > 1
    unit = UNIT_ROUNDOFF[dtype] * float(np.abs(exact).max())
    for answer in answers:
        error = float(np.abs(answer - exact).max())
        assert unit / 100 < error < 16 * unit


def test_the_same_replay_is_the_same() -> None:
    one, other = (ran("linear", drawn("linear"), "bfloat16", np.random.default_rng(5)) for _ in range(2))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", NARROW)
def test_copies_make_no_noise_beyond_half_an_ulp_of_the_largest_value(dtype: str) -> None:
    wanted = claim("embedding", domain_changes={"sizes": {}, "scalars": {}})
    case = build(wanted, Draw({"batch": 2, "seq": 3, "vocab": 5, "hidden": 7}, {}, {}, 3), "normal", dtype)
    attack = Attack(wanted, ReferenceSubject(), dtype)
    expected = attack.expect(case)
    floors = attack.floor(case, lambda inputs, table: reference.evaluate("embedding", inputs, {}, table), expected)
    half = Errors.of(expected["y"]).times(UNIT_ROUNDOFF[dtype])
    for metric in ("rms", "row", "max"):
        assert getattr(floors["y"], metric) <= 2 * getattr(half, metric)
    assert floors["y"].max > 0


def test_what_a_library_flushes_to_zero_is_within_the_floor_and_zeros_have_none() -> None:
    wanted = claim("swiglu", domain_changes={"sizes": {}, "scalars": {}})
    attack = Attack(wanted, ReferenceSubject(), "float32")
    case = build(wanted, Draw({"rows": 1, "intermediate": 2}, {}, {}, 3), "normal", "float32")
    for expected, floor in (([1e-40, 0.0], 1e-40), ([0.0, 0.0], 0.0), ([2e-38, 0.0], 2e-38 * UNIT_ROUNDOFF["float32"])):
        found = attack.floor(case, lambda *_: {}, {"y": np.array([[expected]])})
        assert found["y"].max == pytest.approx(floor, rel=1e-6, abs=0)


def test_a_floor_that_overflows_rejects_the_case() -> None:
    wanted = claim("linear", domain_changes={"sizes": {}, "scalars": {}})
    attack = Attack(wanted, ReferenceSubject(), "float16")
    expected = {"y": np.full((2, 2), 6e4)}
    for floor in (np.nan, np.inf, 5e4):
        dtypes = {"y": np.dtype(np.float16)}
        (found,) = attack.judge(expected, {"y": np.zeros((2, 2), np.float16)}, lambda size=floor: {"y": Errors.flat(size)}, dtypes)
        assert found.rejected, floor


def test_rounding_is_to_nearest_even_and_overflows_to_infinity() -> None:
    assert round_to(np.array(1 + 2.0**-8), "bfloat16") == 1.0
    assert round_to(np.array(1 + 3 * 2.0**-8), "bfloat16") == 1 + 2.0**-6
    assert round_to(np.array(1e39), "float32") == np.inf
    assert round_to(np.array(1e5), "float16") == np.inf
    assert np.isnan(round_to(np.array(np.nan), "bfloat16"))
    value = np.array([0.1, -1e-3, 3e38])
    np.testing.assert_array_equal(round_to(value, "float64"), value)


def test_what_is_kept_in_float32_is_not_rounded_further() -> None:
    assert held_dtype("float32", "bfloat16") == "float32"
    assert held_dtype("float32", "float64") == "float64"
    assert held_dtype("storage", "bfloat16") == "bfloat16"
    assert signatures()["adamw_step"].precision == "float32"
    fine = np.array([1 + 2.0**-20], np.float32)
    inputs = {
        "parameter": fine,
        "gradient": np.zeros(1, np.float32),
        "exp_avg": np.zeros(1, np.float32),
        "exp_avg_sq": np.ones(1, np.float32),
    }
    scalars = {"step": 1, "learning_rate": 0.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    answer = reference.evaluate("adamw_step", inputs, scalars, rounded_table(reference.TABLE, "bfloat16"))
    assert answer["parameter"] == fine


def test_bfloat16_is_real_and_integers_are_not() -> None:
    assert is_real(np.zeros(1, ml_dtypes.bfloat16))
    assert is_real(np.zeros(1, np.float16))
    assert not is_real(np.zeros(1, np.int64))
    assert not is_real(np.zeros(1, bool))


def test_a_zero_stays_zero_in_a_dithered_replay() -> None:
    rows = np.array([[0.0, 1.0, -0.0, 1e-30], [0.0, 0.0, 0.0, 0.0]])
    for seed in range(3):
        table = rounded_table(reference.TABLE, "bfloat16", np.random.default_rng(seed), dither=True)
        given = {"x": rows.astype(np.float32), "branch": np.zeros((2, 4), np.float32)}
        result = reference.evaluate("residual_add", given, {}, table)["y"]
        assert np.array_equal(result == 0, rows == 0)


LABELLED: dict[str, dict[str, Array]] = {
    "weighted_cross_entropy": {"labels": np.array([0])},
    "bce_with_logits": {"targets": np.array([[1.0, 0.0]])},
    "lm_cross_entropy": {"input_ids": np.array([[0, 0]]), "mask": np.ones((1, 2), bool)},
}


def _sure(operation: str, gap: float) -> dict[str, Array]:
    """Logits that give the label's class a probability next to 1, and the other class the rest."""
    logits = np.array([[gap, -gap if operation == "bce_with_logits" else 0.0]], np.float32)
    return {**LABELLED[operation], "logits": np.stack([logits, logits], axis=1) if operation == "lm_cross_entropy" else logits}


def _gradient(operation: str, inputs: dict[str, Array], replay: np.random.Generator, dither: bool) -> Array:
    entry = rounded_table(reference.TABLE, "float32", replay, dither)[operation]
    return entry.backward(np.ones((), np.float32), **inputs)["logits"].reshape(-1, 2)[0]


@pytest.mark.parametrize("dither", [False, True], ids=["operation", "composition"])
@pytest.mark.parametrize("operation", sorted(LABELLED))
def test_a_probability_next_to_one_has_its_own_rounding(operation: str, dither: bool) -> None:
    """p computed as the exponential of a rounded logarithm, as libraries do, is within the noise of replays, and that is no larger."""
    count = 2 if operation == "bce_with_logits" else 1  # the mean is over the classes there
    ratios = []
    for gap in np.random.default_rng(7).uniform(9, 14, 40).astype(np.float32):
        inputs = _sure(operation, float(gap))
        exact = -1 / (1 + np.exp(np.float64(gap)))
        usual = np.exp(-np.log(np.float32(1) + np.exp(-gap))) - np.float32(1)
        replays = [_gradient(operation, inputs, np.random.default_rng([1, replay]), dither) * count for replay in range(24)]
        ratios.append(abs(float(usual) - exact) / max(abs(float(each[0]) - exact) for each in replays))
        assert max(abs(float(each[1]) + exact) for each in replays) < 4e-6 * abs(exact)
    assert 0.3 < max(ratios) < 2


def test_the_rounding_of_a_probability_does_not_grow_with_the_classes() -> None:
    """Over 1,000 classes it is two unit roundoffs for the label's class at most, and nothing that counts for the others."""
    logits = np.zeros((1, 1000), np.float32)
    logits[0, 3] = 24.0
    inputs = {"logits": logits, "labels": np.array([3])}
    entry = reference.TABLE["weighted_cross_entropy"]
    exact = entry.backward(np.ones(()), **{**inputs, "logits": logits.astype(np.float64)})["logits"]
    seen = []
    for replay in range(24):
        rounded = rounded_table(reference.TABLE, "float32", np.random.default_rng(replay), dither=True)["weighted_cross_entropy"]
        seen.append(np.abs(rounded.backward(np.ones((), np.float32), **inputs)["logits"] - exact)[0])
    worst = np.max(seen, axis=0)
    assert 0.5 * 2.0**-24 < worst[3] <= 2.0**-23
    assert np.delete(worst, 3).max() < 1e-4 * np.abs(np.delete(exact[0], 3)).max()


def test_arrays_and_tensors_are_rounded_by_the_same_rule() -> None:
    values = (np.random.default_rng(0).standard_normal(4000) * 10.0 ** np.random.default_rng(1).uniform(-30, 30, 4000)).astype(np.float32)
    values[:5] = [0.0, np.inf, -np.inf, np.finfo(np.float32).max, 1 + 2.0**-8]
    tensor = torch.tensor(values)
    np.testing.assert_array_equal(nearest(values, STORAGE["bfloat16"]), nearest(tensor, torch.bfloat16).numpy())
    np.testing.assert_array_equal(to_tf32(values), to_tf32(tensor).numpy())
    finite, unit = tensor[torch.isfinite(tensor)], UNIT_ROUNDOFF["bfloat16"]
    generator = torch.Generator().manual_seed(0)
    both = torch.stack([finite * (1 + unit), finite * (1 - unit)])
    assert bool((moved(finite, unit, generator) == both).any(0).all())
    ulp = np.ldexp(unit, np.frexp(finite.numpy())[1])
    with np.errstate(over="ignore"):
        shifted = dithered(finite.numpy(), unit, np.random.default_rng(0))
    for found in (dithered(finite, unit, generator).numpy(), shifted):
        rounded = nearest(found, STORAGE["bfloat16"])
        assert (np.abs(rounded - finite.numpy())[np.isfinite(rounded)] <= ulp[np.isfinite(rounded)]).all()
        assert 0.2 < float(np.mean(rounded != nearest(finite.numpy(), STORAGE["bfloat16"]))) < 0.3
