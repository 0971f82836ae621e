"""Every backward of the reference against central differences in float64, and every operation's dtype."""

from typing import Any

import numpy as np
import pytest
from reference_cases import drawn

from blackswan.reference import TABLE, attention, differentiate, evaluate

DIFFERENTIABLE = sorted(name for name, operation in TABLE.items() if operation.backward is not None)


def _gradients(name: str, inputs: dict[str, Any], scalars: dict[str, Any], cotangent: np.ndarray) -> dict[str, np.ndarray]:
    """Everything that the operation's backward returns."""
    operation = TABLE[name]
    return operation.backward(cotangent, **inputs, **scalars)


def _central_differences(name: str, inputs: dict[str, Any], scalars: dict[str, Any], cotangent: np.ndarray, wrt: str) -> np.ndarray:
    """∂(Σ cotangent · y)/∂x element by element; h = 1e-5 balances truncation h² against rounding u/h."""
    h = 1e-5
    gradient = np.zeros_like(inputs[wrt])
    for index in np.ndindex(gradient.shape):
        change = np.zeros_like(gradient)
        change[index] = h
        (up,), (down,) = (evaluate(name, {**inputs, wrt: inputs[wrt] + sign * change}, scalars).values() for sign in (1, -1))
        gradient[index] = np.sum(cotangent * (up - down)) / (2 * h)
    return gradient


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_equals_central_differences(name: str) -> None:
    for seed, (inputs, scalars) in enumerate(drawn(name)):
        (output,) = evaluate(name, inputs, scalars).values()
        cotangent = np.asarray(np.random.default_rng(seed).standard_normal(output.shape))
        gradients = _gradients(name, inputs, scalars, cotangent)
        assert gradients
        for wrt, gradient in gradients.items():
            expected = _central_differences(name, inputs, scalars, cotangent, wrt)
            # Truncation h²/6·f‴ ≈ 2e-11·f‴ and rounding u·|f|/h ≈ 1e-11·|f|; rms_norm's f‴ at a small row is what needs the rest.
            scale = max(1.0, float(np.abs(expected).max()))
            assert gradient.shape == expected.shape
            assert np.abs(gradient - expected).max() <= 1e-7 * scale, wrt


# BLAS has set the flag of an invalid operation in products of finite matrices (numpy/numpy#24067, OpenMathLib/OpenBLAS#1924), here once.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("name", sorted(TABLE))
def test_an_operation_stays_in_float32(name: str) -> None:
    """Lines that name no dtype can leave the inputs' dtype; only the schedule and integer codes are another by their signature."""
    for inputs, scalars in drawn(name):
        single = {
            key: value.astype(np.float32) if value is not None and value.dtype == np.float64 else value for key, value in inputs.items()
        }
        outputs = evaluate(name, single, scalars)
        expected = {"learning_rate_schedule": {np.dtype(np.float64)}}.get(name, {np.dtype(np.float32), np.dtype(np.uint8)})
        assert {value.dtype for value in outputs.values()} <= expected
        assert any(value.dtype.kind == "f" for value in outputs.values())
        if TABLE[name].backward is not None:
            (output,) = outputs.values()
            gradients = _gradients(name, single, scalars, np.ones_like(output))
            assert {value.dtype for value in gradients.values()} == {np.dtype(np.float32)}
            assert all(np.isfinite(value).all() for value in gradients.values())


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"nf4_quantize", "nf4_double_quantize", "nf4_double_dequantize"}))
def test_an_operation_stays_in_float64(name: str) -> None:
    for inputs, scalars in drawn(name):
        assert {value.dtype for value in evaluate(name, inputs, scalars).values()} == {np.dtype(np.float64)}


@pytest.mark.parametrize("name", ["linear", "lora_linear", "rms_norm"])
def test_a_backward_computes_only_what_is_needed(name: str) -> None:
    inputs, scalars = drawn(name)[-1]
    output = evaluate(name, inputs, scalars)["y"]
    every = differentiate(name, inputs, scalars, {"y": output}, wrt=[key for key, value in inputs.items() if value is not None])
    backward = TABLE[name].backward
    for key, gradient in every.items():
        alone = backward(output, **inputs, **scalars, needs={key})
        assert list(alone) == [key]
        np.testing.assert_array_equal(alone[key], gradient)


def test_a_query_that_sees_no_key_gives_zero_and_takes_none() -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 4, heads, 3)) for heads in (4, 2, 2))
    inputs = {"q": q, "k": k, "v": v, "mask": np.array([[False, False, True, True]])}
    y = evaluate("attention", inputs, {})["y"]
    gradients = differentiate("attention", inputs, {}, {"y": np.ones_like(y)}, wrt=["q", "k", "v"])
    assert not y[:, :2].any()
    assert y[:, 2:].all()
    for gradient in gradients.values():
        assert not gradient[:, :2].any()
    assert gradients["v"][:, 2:].all()


def test_the_gradient_of_attention_may_read_the_stored_result() -> None:
    """With y as it is nothing changes; a perturbed y enters through dy · y alone, which leaves the gradient of v."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 5, heads, 3)) for heads in (4, 2, 2))
    inputs = {"q": q, "k": k, "v": v, "mask": random.random((2, 5)) < 0.6}
    y = evaluate("attention", inputs, {})["y"]
    cotangent = random.standard_normal(y.shape)
    plain = _gradients("attention", inputs, {}, cotangent)
    stored = _gradients("attention", {**inputs, "y": y}, {}, cotangent)
    moved = _gradients("attention", {**inputs, "y": y + random.standard_normal(y.shape)}, {}, cotangent)
    for name, gradient in plain.items():
        np.testing.assert_allclose(stored[name], gradient, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(moved["v"], plain["v"])
    assert (moved["q"] != stored["q"]).any()


@pytest.mark.parametrize("queries", [1, 3, 5])
@pytest.mark.parametrize("stored", [False, True])
def test_blocks_of_queries_do_not_show(stored: bool, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    (q, y, cotangent), (k, v) = (random.standard_normal((count, 2, 7, heads, 3)) for count, heads in ((3, 4), (2, 2)))
    mask = np.array([[False] * 4 + [True] * 3, [True, True, False, True, True, False, True]])
    inputs = {"q": q, "k": k, "v": v, "mask": mask} | ({"y": y} if stored else {})

    def found() -> dict[str, np.ndarray]:
        return {"y": TABLE["attention"].forward(q, k, v, mask), **_gradients("attention", inputs, {}, cotangent)}

    whole = found()
    monkeypatch.setattr(attention, "QUERIES", queries)
    seen, made = [], attention._probabilities

    def noted(queries: np.ndarray, keys: np.ndarray, visible: np.ndarray) -> np.ndarray:
        seen.append(keys.shape[2])
        return made(queries, keys, visible)

    monkeypatch.setattr(attention, "_probabilities", noted)
    for name, value in found().items():
        np.testing.assert_allclose(value, whole[name], rtol=0, atol=1e-13, err_msg=name)
    stops = [min(start + queries, 7) for start in range(0, 7, queries)]
    assert seen == stops + stops[::-1], "no key is scored that none of the block's queries may see"


@pytest.mark.parametrize("queries", [2, 64])
def test_attention_takes_masks_of_numbers_and_narrows_nothing(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "QUERIES", queries)
    random = np.random.default_rng(1)
    q, dy, k, v = (random.standard_normal((2, 5, heads, 3)).astype(np.float32) for heads in (4, 4, 2, 2))
    mask = random.random((2, 5)) < 0.6
    inputs = {"q": q, "k": k, "v": v}
    expected = _gradients("attention", {**inputs, "mask": mask}, {}, dy)
    for name, value in _gradients("attention", {**inputs, "mask": mask.astype(np.int64)}, {}, dy).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert TABLE["attention"].forward(q, k, v.astype(np.float64), mask).dtype == np.float64
    for name, value in _gradients("attention", {**inputs, "mask": mask}, {}, dy.astype(np.float64)).items():
        assert value.dtype == np.float64, name


def test_unknown_operations_and_inputs_are_named() -> None:
    with pytest.raises(KeyError, match="rms_norm"):
        evaluate("rmsnorm", {}, {})
    inputs, scalars = drawn("softmax")[0]
    with pytest.raises(KeyError, match="'z'"):
        differentiate("softmax", inputs, scalars, {"y": inputs["x"]}, wrt=["z"])
    with pytest.raises(ValueError, match="no gradient"):
        differentiate("lora_merge", *drawn("lora_merge")[0], {}, wrt=["weight"])
