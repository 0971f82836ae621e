"""The reference's elementary operations against the libraries that define them: bitsandbytes, torch, transformers."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from bitsandbytes import functional as bitsandbytes
from reference_cases import drawn

from blackswan.falsifiers.numeric.generators import padding
from blackswan.reference import COMPOSITIONS, TABLE, Composition, Operation, Tape, evaluate, nf4, nf4_double, record
from blackswan.reference.classifier import parameter_shapes

DTYPES = {"float32": (np.dtype(np.float32), torch.float32), "bfloat16": (np.dtype(ml_dtypes.bfloat16), torch.bfloat16)}


def _as_torch(value: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value.astype(np.float32)).to(dtype)


def _flush(value: np.ndarray) -> np.ndarray:
    """Subnormals to zero, as processors do that have an instruction for float32 → bfloat16."""
    return np.where(np.abs(value) < np.finfo(np.float32).tiny, np.float32(0), value)


def _weights(flavour: str, random: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """float32 weights; `midpoints` puts every element on a decision boundary or one ulp beside it."""
    if flavour == "midpoints":
        scale = np.float32(random.choice([1.0, 0.037, 3.3, 1e-30]))
        middle = random.choice(nf4.MIDPOINTS, shape) * scale
        beside = np.nextafter(middle, random.choice(np.array([-np.inf, np.inf], np.float32), shape))
        values = np.where(random.integers(2, size=shape) == 0, middle, beside).astype(np.float32)
        values.ravel()[::64] = scale
        return values
    values = random.standard_normal(shape).astype(np.float32)
    if flavour == "zeros":
        values.ravel()[: values.size // 2] = 0
    if flavour == "outliers":
        values.ravel()[:: max(1, values.size // 3)] *= 1e6
    if flavour == "subnormal":
        values *= np.float32(1e-39)
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("flavour", ["normal", "midpoints", "zeros", "outliers", "subnormal"])
@pytest.mark.parametrize("block_size", [64, 128])
def test_nf4_equals_bitsandbytes_bit_for_bit(flavour: str, dtype: str, block_size: int) -> None:
    numpy_dtype, torch_dtype = DTYPES[dtype]
    random = np.random.default_rng(len(flavour))
    for shape in [(1, block_size), (4, 160), (32, 68), (16, 1000), (256, 512)]:
        weight = _weights(flavour, random, (shape[0], shape[1] - shape[0] * shape[1] % block_size // shape[0])).astype(numpy_dtype)
        usable = weight.ravel()[: weight.size // block_size * block_size].reshape(1, -1)
        codes, absmax = nf4.quantize(usable, block_size)
        expected, state = bitsandbytes.quantize_4bit(_as_torch(usable, torch_dtype), blocksize=block_size, quant_type="nf4")
        np.testing.assert_array_equal(codes, expected.numpy().ravel())
        np.testing.assert_array_equal(absmax, state.absmax.numpy())
        restored = nf4.dequantize(codes, absmax, *usable.shape, block_size)
        library = bitsandbytes.dequantize_4bit(expected, state)
        assert restored.dtype == np.float32
        np.testing.assert_array_equal(
            *(_flush(value) for value in (restored.astype(numpy_dtype).astype(np.float32), library.float().numpy()))
        )


@pytest.mark.parametrize("flavour", ["normal", "midpoints", "zeros"])
def test_nf4_of_a_tail(flavour: str) -> None:
    """A shorter last block: bitsandbytes' CPU code divides it by its absmax where it multiplies the others by the reciprocal.

    So the tail equals bitsandbytes' on the weight padded with zeros to a whole block, and its own tail except where x / absmax and
    x · (1 / absmax) fall on two sides of a midpoint.
    """
    random = np.random.default_rng(0)
    for shape in [(1, 1), (3, 7), (1, 63), (5, 13), (9, 33), (1, 129)]:
        weight = _weights(flavour, random, shape)
        codes, absmax = nf4.quantize(weight, 64)
        padded = np.pad(weight.ravel(), (0, -weight.size % 64))
        expected, state = bitsandbytes.quantize_4bit(torch.tensor(padded), blocksize=64, quant_type="nf4")
        np.testing.assert_array_equal(codes, expected.numpy().ravel()[: codes.size])
        np.testing.assert_array_equal(absmax, state.absmax.numpy())
        assert codes.size == (weight.size + 1) // 2
        assert weight.size % 2 == 0 or codes[-1] & 0x0F == nf4.ZERO_CODE
        unpadded, _ = bitsandbytes.quantize_4bit(torch.tensor(weight), blocksize=64, quant_type="nf4")
        size = -(-weight.size // 64)
        scale = np.repeat(np.maximum(absmax, np.float32(1e-38)), 64)[: weight.size]
        forms = (weight.ravel() / scale, weight.ravel() * (np.float32(1) / scale))
        agree = np.equal(*(np.searchsorted(nf4.MIDPOINTS, np.clip(form, -1, 1)) for form in forms))
        assert size == absmax.size
        mine, theirs = (np.stack([c >> 4, c & 15], -1).ravel()[: weight.size] for c in (codes, unpadded.numpy().ravel()))
        np.testing.assert_array_equal(mine[agree], theirs[agree])
        assert agree.mean() > 0.5


def test_the_dynamic_codebook_equals_bitsandbytes_bit_for_bit() -> None:
    np.testing.assert_array_equal(nf4_double.CODEBOOK, bitsandbytes.create_dynamic_map().numpy())
    np.testing.assert_array_equal(nf4_double.UNSIGNED, bitsandbytes.create_dynamic_map(signed=False).numpy())


@pytest.mark.parametrize("blocks", [1, 2, 255, 256, 257, 3000])
def test_double_quantisation_equals_bitsandbytes(blocks: int) -> None:
    """Scales and dequantisation bit for bit; codes as far as its CPU kernel resolves them, which looks them up in a table of 2^16 bins."""
    weight = torch.tensor(np.random.default_rng(blocks).standard_normal((blocks, 64)), dtype=torch.float32)
    _, plain = bitsandbytes.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    _, state = bitsandbytes.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=True)
    absmax, offset = plain.absmax.numpy(), state.offset.numpy()
    codes, scales, mean = nf4_double.quantize(absmax)
    # torch adds in blocks; any order errs by less than log2(n) ulp here.
    assert abs(float(mean) - float(offset)) <= 12 * np.spacing(offset)
    codes, scales = nf4_double.quantize_centred(absmax - offset)
    np.testing.assert_array_equal(scales, state.state2.absmax.numpy())

    theirs = state.absmax.numpy()
    reciprocal = np.float32(1) / np.maximum(np.repeat(scales, 256)[:blocks], nf4.SMALLEST_DIVISOR)
    scaled = (absmax - offset) * reciprocal
    nearest = np.abs(scaled - nf4_double.CODEBOOK[codes])
    # In a group of zeros every code means zero; bitsandbytes writes another one than the nearest.
    live = np.repeat(scales, 256)[:blocks] > 0
    assert (np.abs(scaled - nf4_double.CODEBOOK[theirs]) - nearest <= 2.0 / 2**16)[live].all()
    assert (nearest <= np.abs(scaled[:, None].astype(float) - nf4_double.CODEBOOK).min(axis=1) + 2.0**-24).all()
    assert (codes == theirs)[live].sum() >= 0.98 * live.sum()

    restored = nf4_double.dequantize(theirs, scales, offset)
    library = bitsandbytes.dequantize_blockwise(state.absmax, state.state2) + state.offset
    np.testing.assert_array_equal(restored, library.numpy())


@pytest.mark.parametrize("seed", range(10))
def test_adamw_equals_torch(seed: int) -> None:
    random = np.random.default_rng(seed)
    parameter, moments = random.standard_normal(20), (np.zeros(20), np.zeros(20))
    scalars = {"learning_rate": 0.03, "beta1": 0.85, "beta2": 0.97, "eps": 1e-6, "weight_decay": float(random.choice([0.0, 0.1]))}
    theirs = torch.nn.Parameter(torch.tensor(parameter))
    betas = (scalars["beta1"], scalars["beta2"])
    optimiser = torch.optim.AdamW([theirs], 0.03, betas, scalars["eps"], scalars["weight_decay"])
    for step in range(1, 8):
        gradient = random.standard_normal(20) * 10.0 ** random.integers(-8, 3)
        theirs.grad = torch.tensor(gradient)
        optimiser.step()
        inputs = {"parameter": parameter, "gradient": gradient, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        outputs = evaluate("adamw_step", inputs, {**scalars, "step": step})
        parameter, moments = outputs["parameter"], (outputs["exp_avg"], outputs["exp_avg_sq"])
        np.testing.assert_allclose(parameter, theirs.detach().numpy(), rtol=1e-12, atol=1e-15)
        for moment, value in outputs.items():
            if moment != "parameter":
                np.testing.assert_allclose(value, optimiser.state[theirs][moment].numpy(), rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("total", "fraction"), [(1, 0.0), (7, 0.0), (7, 0.06), (50, 0.1), (33, 0.5), (4, 1.0)])
def test_the_schedule_equals_transformers(kind: str, total: int, fraction: float) -> None:
    scalars = {"total_steps": total, "peak": 2e-4, "warmup_fraction": fraction, "kind": kind}
    rates = evaluate("learning_rate_schedule", {}, scalars)["rates"]
    optimiser = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2e-4)
    name = {"constant": "constant_with_warmup"}.get(kind, kind)
    warmup = int(np.ceil(fraction * total))
    schedule = transformers.get_scheduler(name, optimiser, num_warmup_steps=warmup, num_training_steps=total)
    expected = []
    for _ in range(total):
        expected.append(schedule.get_last_lr()[0])
        optimiser.step()
        schedule.step()
    np.testing.assert_allclose(rates, expected, rtol=1e-14, atol=1e-20)


def test_losses_equal_torch() -> None:
    functional = torch.nn.functional
    for inputs, _ in drawn("weighted_cross_entropy"):
        weights = None if inputs["class_weights"] is None else torch.tensor(inputs["class_weights"])
        each = functional.cross_entropy(torch.tensor(inputs["logits"]), torch.tensor(inputs["labels"]), weights, reduction="none")
        np.testing.assert_allclose(evaluate("weighted_cross_entropy", inputs, {})["loss"], each.mean(), rtol=1e-13)
    for inputs, _ in drawn("bce_with_logits"):
        logits = 300 * inputs["logits"]
        expected = functional.binary_cross_entropy_with_logits(torch.tensor(logits), torch.tensor(inputs["targets"]))
        np.testing.assert_allclose(evaluate("bce_with_logits", {**inputs, "logits": logits}, {})["loss"], expected, rtol=1e-13, atol=1e-13)
    for inputs, _ in drawn("softmax"):
        x = 300 * inputs["x"]
        np.testing.assert_allclose(evaluate("softmax", {"x": x}, {})["y"], torch.tensor(x).softmax(-1), rtol=1e-12, atol=1e-300)


NAN = np.array([[0.0, 1.0], [np.nan, 0.0]])
LOGITS = np.zeros((2, 2))
LABELS = np.array([0, 1])
REJECTED: list[tuple[str, dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ("weighted_cross_entropy", {"logits": LOGITS, "labels": LABELS, "class_weights": np.ones(3)}, {}, ValueError, r"\[3\]; expected \[2\]"),
    (
        "weighted_cross_entropy",
        {"logits": LOGITS, "labels": LABELS, "class_weights": 1.0 * LABELS},
        {},
        ValueError,
        r"class_weights\[0\] is 0",
    ),
    ("weighted_cross_entropy", {"logits": LOGITS[:0], "labels": LABELS[:0]}, {}, ValueError, "no sample"),
    ("weighted_cross_entropy", {"logits": LOGITS, "labels": LABELS[:1]}, {}, ValueError, r"labels have shape \[1\]; expected \[2\]"),
    ("bce_with_logits", {"logits": NAN, "targets": LOGITS}, {}, ValueError, r"logits\[1, 0\] is nan"),
    ("bce_with_logits", {"logits": LOGITS, "targets": LOGITS + 2}, {}, ValueError, r"targets\[0, 0\] is 2"),
    ("bce_with_logits", {"logits": LOGITS, "targets": LOGITS[:1]}, {}, ValueError, "targets have shape"),
    (
        "lm_cross_entropy",
        {"logits": np.zeros((1, 2, 2)), "input_ids": np.array([[0, 2]]), "mask": np.ones((1, 2), bool)},
        {},
        ValueError,
        r"input_ids\[0, 1\] is 2",
    ),
    (
        "lm_cross_entropy",
        {"logits": np.full((1, 2, 2), np.inf), "input_ids": np.zeros((1, 2), int), "mask": np.ones((1, 2), bool)},
        {},
        ValueError,
        r"logits\[0, 0, 0\] is inf",
    ),
    ("pool", {"x": np.zeros((1, 1, 1)), "mask": np.array([[True]])}, {"mode": "max"}, ValueError, "'max'"),
    ("average_gradients", {"gradients": LOGITS, "counts": np.array([1, 0])}, {}, ValueError, r"counts\[1\] is 0"),
    ("embedding", {"input_ids": np.array([[0, 3]]), "weight": LOGITS}, {}, ValueError, r"input_ids\[0, 1\] is 3"),
    ("learning_rate_schedule", {}, {"total_steps": 1, "peak": 1.0, "warmup_fraction": 0.0, "kind": "step"}, ValueError, "'step'"),
    ("adamw_step", drawn("adamw_step")[0][0], {"step": 0, "learning_rate": 1.0}, ValueError, "counts from 1"),
]


@pytest.mark.parametrize(("name", "inputs", "scalars", "error", "message"), REJECTED)
def test_bad_input_is_named(name: str, inputs: dict[str, Any], scalars: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evaluate(name, inputs, scalars)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_may_hold_anything(side: str) -> None:
    mask = np.array([[False, True, True]]) if side == "left" else np.array([[True, True, False]])
    x = np.array([[[np.nan], [1.0], [3.0]]]) if side == "left" else np.array([[[1.0], [3.0], [np.nan]]])
    pooled = {mode: evaluate("pool", {"x": x, "mask": mask}, {"mode": mode})["y"].item() for mode in ("mean", "last", "first")}
    assert pooled == {"mean": 2.0, "last": 3.0, "first": 1.0}


SCALARS = {"family": "qwen2", "vocab": 7, "hidden": 4, "intermediate": 6, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 2}
SCALARS |= {"eps": 1e-6, "theta": 1e4, "classes": 3, "rank": 2, "alpha": 2.0, "pooling": "last"}


def _classifier_inputs(dtype: type = np.float64) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    parameters = {f"parameters/{name}": random.standard_normal(shape).astype(dtype) for name, shape in parameter_shapes(SCALARS).items()}
    samples = {"input_ids": random.integers(0, 7, (4, 5)), "mask": padding(random, (4, 5), "masked"), "labels": random.integers(0, 3, 4)}
    return {**samples, **parameters}


def test_every_intermediate_of_training_stays_in_float32() -> None:
    scalars = SCALARS | {"steps": 2, "batch": 2, "micro": 1, "learning_rate": 1e-2, "schedule": "linear", "warmup_fraction": 0.5}
    for nf4_base in (False, True):
        tape = record("train_steps", _classifier_inputs(np.float32), scalars | {"nf4": nf4_base})
        del tape.values["learning_rate_schedule"]
        assert np.dtype(np.float64) not in {value.dtype for value in tape.values.values()}


def test_an_operation_and_a_composition_can_be_replaced() -> None:
    inputs = _classifier_inputs()
    expected = evaluate("classifier_loss", inputs, SCALARS)["loss"]
    no_rope = Operation(lambda x, positions, theta: x, lambda dy, x, positions, theta: {"x": dy})  # noqa: ARG005
    assert evaluate("classifier_loss", inputs, SCALARS, {**TABLE, "rope": no_rope})["loss"] != expected

    def constant_logits(tape: Tape, scalars: Any) -> None:
        tape.outputs = {"logits": tape.put("score", np.zeros((len(tape.values["mask"]), scalars["classes"])))}

    table = {**TABLE, "classifier_forward": Composition(constant_logits)}
    np.testing.assert_allclose(evaluate("classifier_loss", inputs, SCALARS, table)["loss"], np.log(3))
    training = SCALARS | {"steps": 2, "batch": 2, "micro": 2, "learning_rate": 1e-2}
    np.testing.assert_allclose(evaluate("train_steps", inputs, training, table)["losses"], np.log(3))


def test_training_changes_no_input() -> None:
    inputs = _classifier_inputs()
    before = {name: value.copy() for name, value in inputs.items()}
    outputs = evaluate("train_steps", inputs, SCALARS | {"steps": 2, "batch": 2, "micro": 1, "learning_rate": 1e-2})
    for name, value in before.items():
        np.testing.assert_array_equal(inputs[name], value)
        trained = outputs.get(name.replace("parameters/", "trainable/"))
        assert trained is None or (trained != value).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("model.norm.weight", None, "'model.norm.weight' is missing"),
        ("model.norm.weight", np.ones(3), r"shape \[3\]; expected \[4\]"),
        ("model.norm.wieght", np.ones(4), "'model.norm.wieght' belongs to no such model; the nearest name is 'model.norm.weight'"),
    ],
)
def test_a_wrong_set_of_parameters_is_named(name: str, change: np.ndarray | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate("classifier_loss", _classifier_inputs() | {f"parameters/{name}": change}, SCALARS)


def test_only_what_leads_to_a_wanted_value_is_differentiated() -> None:
    asked: list[str] = []

    def counted(name: str, operation: Operation) -> Operation:
        def backward(*cotangents: np.ndarray, **arguments: Any) -> dict[str, np.ndarray]:
            asked.append(name)
            return operation.backward(*cotangents, **arguments)

        return Operation(operation.forward, backward, operation.outputs)

    tape = record("classifier_loss", _classifier_inputs(), SCALARS, {name: counted(name, operation) for name, operation in TABLE.items()})
    every = tape.backward({"loss": np.ones(())})
    whole, asked[:] = list(asked), []
    head = tape.backward({"loss": np.ones(())}, ["score.weight"])
    assert asked == ["weighted_cross_entropy", "linear"]
    assert len(whole) > 20
    assert list(head) == ["score.weight"]
    np.testing.assert_array_equal(head["score.weight"], every["score.weight"])


def test_every_operation_of_the_vocabulary_has_a_reference() -> None:
    import yaml

    document = yaml.safe_load((Path(__file__).parent.parent / "contracts" / "operations.yaml").read_text(encoding="utf-8"))["operations"]
    entries = dict(document)
    assert set(TABLE) | set(COMPOSITIONS) == set(entries)
    for name, operation in TABLE.items():
        entry = entries[name]
        assert operation.outputs == tuple(entry["outputs"])
        assert (operation.backward is not None) == bool(entry.get("gradients"))
        code = operation.forward.__code__
        conventions = {*entry.get("conventions", {})} - {"loss_dtype"}
        expected = {*entry["inputs"], *entry.get("scalars", {}), *entry.get("attributes", []), *conventions}
        assert set(code.co_varnames[: code.co_argcount]) == expected, name
        if operation.backward is not None:
            inputs, scalars = drawn(name)[0]
            present = {key for key, value in inputs.items() if value is not None}
            (output,) = operation.run({**inputs, **scalars}).values()
            assert set(operation.backward(output, **inputs, **scalars)) == present.intersection(entry["gradients"]), name
