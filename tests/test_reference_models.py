"""The reference's compositions against transformers with true float64 arithmetic: outputs, gradients, training."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from float64_transformers import adapt, build, classify, hidden_states, true_float64

from blackswan.falsifiers.numeric.generators import padding
from blackswan.reference import classifier, decoder, differentiate, evaluate, record

SEEDS = range(12)
FAMILIES = ("llama", "qwen2", "qwen3")


def _draw(seed: int) -> tuple[np.random.Generator, dict[str, Any], dict[str, np.ndarray]]:
    """A random configuration of a decoder with padded input."""
    random = np.random.default_rng(seed)
    kv_heads, groups, half = (int(n) for n in random.integers(1, 4, 3))
    family = FAMILIES[seed % 3]
    # transformers refuses a Llama whose hidden size is no multiple of its heads.
    hidden = kv_heads * groups * int(random.integers(1, 4)) if family == "llama" else int(random.integers(2, 24))
    scalars = {
        "family": family,
        "vocab": int(random.integers(2, 30)),
        "hidden": hidden,
        "intermediate": int(random.integers(1, 30)),
        "layers": int(random.integers(1, 4)),
        "heads": kv_heads * groups,
        "kv_heads": kv_heads,
        "head_dim": 2 * half,
        "eps": float(random.choice([1e-6, 1e-5, 1e-2])),
        "theta": float(random.choice([1e4, 1e6])),
        "tied": bool(random.integers(2)),
    }
    samples, seq = int(random.integers(1, 5)), int(random.integers(2, 12))
    mask = padding(random, (samples, seq), "masked")
    mask[0] = True
    return random, scalars, {"input_ids": random.integers(0, scalars["vocab"], (samples, seq)), "mask": mask}


def _parameters(random: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: random.standard_normal(shape) / np.sqrt(shape[-1]) + ("norm" in name) for name, shape in shapes.items()}


def _flat(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"parameters/{name}": value for name, value in parameters.items()}


def _assert_close(actual: np.ndarray, expected: torch.Tensor, bound: float, name: str) -> None:
    """The largest error relative to the tensor's largest entry."""
    right = expected.detach().numpy()
    assert actual.dtype == right.dtype == np.float64
    assert actual.shape == right.shape
    assert np.isfinite(right).all(), name
    assert np.abs(actual - right).max() <= bound * np.abs(right).max(), name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_decoder_equals_transformers(seed: int) -> None:
    random, scalars, inputs = _draw(seed)
    parameters = _parameters(random, decoder.parameter_shapes(scalars))
    outputs = evaluate("decoder_forward", {**inputs, **_flat(parameters)}, scalars)
    model = build(scalars, parameters)
    real = inputs["mask"]
    with true_float64(), torch.no_grad():
        hidden = hidden_states(model, inputs["input_ids"], real)
        logits = model.lm_head(hidden)
    _assert_close(outputs["hidden"][real], hidden[torch.tensor(real)], 1e-12, "hidden")
    _assert_close(outputs["logits"][real], logits[torch.tensor(real)], 1e-12, "logits")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_language_model_loss_and_its_gradients_equal_transformers(seed: int) -> None:
    random, scalars, inputs = _draw(seed)
    parameters = _parameters(random, decoder.parameter_shapes(scalars))
    arguments = {**inputs, **_flat(parameters)}
    loss = evaluate("language_model_loss", arguments, scalars)["loss"]
    gradients = differentiate("language_model_loss", arguments, scalars, {"loss": np.ones(())}, ["parameters"])
    model = build(scalars, parameters)
    with true_float64():
        logits = model.lm_head(hidden_states(model, inputs["input_ids"], inputs["mask"]))
        labels = torch.tensor(np.where(inputs["mask"], inputs["input_ids"], -100))
        # A padding label is ignored; a real token after left padding is the first one and nothing predicts it.
        labels[:, 1:][torch.tensor(~inputs["mask"][:, :-1])] = -100
        expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        expected.backward()
    _assert_close(loss, expected, 1e-12, "loss")
    assert list(gradients) == [f"parameters/{name}" for name in parameters]
    for name, parameter in model.named_parameters():
        _assert_close(gradients[f"parameters/{name}"], parameter.grad, 1e-10, name)


def _classifier(seed: int, nf4: bool = False) -> tuple[np.random.Generator, dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    random, scalars, inputs = _draw(seed)
    scalars |= {
        "classes": int(random.integers(2, 6)),
        "rank": int(random.integers(1, 5)),
        "alpha": float(random.uniform(1, 16)),
        "targets": ("q_v", "all")[seed // 3 % 2],
        "pooling": ("mean", "last", "first")[seed // 2 % 3],
        "nf4": nf4,
    }
    inputs["labels"] = random.integers(0, scalars["classes"], len(inputs["mask"]))
    if seed % 2:
        inputs["class_weights"] = random.uniform(0.2, 3, scalars["classes"])
    return random, scalars, inputs, _parameters(random, classifier.parameter_shapes(scalars))


def _model(scalars: dict[str, Any], parameters: dict[str, np.ndarray]) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    names = classifier.trainable_names(scalars)
    model = build(scalars, {name: value for name, value in parameters.items() if name not in names})
    return model, adapt(model, {name: parameters[name] for name in names}, scalars["alpha"])


def _weighted_loss(logits: torch.Tensor, inputs: dict[str, np.ndarray]) -> torch.Tensor:
    weights = inputs.get("class_weights")
    each = torch.nn.functional.cross_entropy(
        logits, torch.tensor(inputs["labels"]), None if weights is None else torch.tensor(weights), reduction="none"
    )
    return each.mean()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("nf4", [False, True])
def test_the_classifier_and_its_gradients_equal_transformers_with_lora(seed: int, nf4: bool) -> None:
    _, scalars, inputs, parameters = _classifier(seed, nf4)
    arguments = {**inputs, **_flat(parameters)}
    outputs = evaluate("classifier_loss", arguments, scalars)
    gradients = differentiate("classifier_loss", arguments, scalars, {"loss": np.ones(())}, ["trainable"])
    model, trainable = _model(scalars, _through_nf4(parameters) if nf4 else parameters)
    with true_float64():
        logits = classify(model, trainable, inputs["input_ids"], inputs["mask"], scalars["pooling"])
        loss = _weighted_loss(logits, inputs)
        loss.backward()
    _assert_close(outputs["logits"], logits, 1e-12, "logits")
    _assert_close(outputs["loss"], loss, 1e-12, "loss")
    assert list(gradients) == [f"parameters/{name}" for name in classifier.trainable_names(scalars)]
    assert sorted(trainable) == sorted(classifier.trainable_names(scalars))
    for name, parameter in trainable.items():
        _assert_close(gradients[f"parameters/{name}"], parameter.grad, 1e-10, name)


def _through_nf4(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """bitsandbytes' round trip of the projections' base weights, padded to whole blocks: its rule for a shorter last block is another."""
    from bitsandbytes import functional

    result = dict(parameters)
    for name, value in parameters.items():
        if name.endswith("_proj.weight"):
            flat = torch.tensor(value, dtype=torch.float32).flatten()
            padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 64))
            restored = functional.dequantize_4bit(*functional.quantize_4bit(padded, blocksize=64, quant_type="nf4"))
            result[name] = restored.flatten()[: value.size].view(value.shape).double().numpy()
    return result


@pytest.mark.parametrize("seed", range(12))
def test_training_equals_torch_on_whole_batches(seed: int) -> None:
    """Micro-batches against one backward over the whole batch, torch's AdamW, transformers' schedule, clipping by torch's norm."""
    random, scalars, inputs, parameters = _classifier(seed, nf4=bool(seed % 2))
    steps, batch = 3, int(random.integers(1, 6))
    samples, seq = steps * batch, inputs["mask"].shape[1]
    inputs |= {
        "input_ids": random.integers(0, scalars["vocab"], (samples, seq)),
        "mask": padding(random, (samples, seq), "masked"),
        "labels": random.integers(0, scalars["classes"], samples),
    }
    training = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_norm": 0.5, "warmup_fraction": 0.3, "schedule": "cosine"}
    attributes = {"steps": steps, "batch": batch, "micro": int(random.integers(1, batch + 1))}
    outputs = evaluate("train_steps", {**inputs, **_flat(parameters)}, {**scalars, **training, **attributes})

    model, trainable = _model(scalars, _through_nf4(parameters) if scalars["nf4"] else parameters)
    optimiser = torch.optim.AdamW(trainable.values(), lr=1e-2, weight_decay=0.1)
    schedule = transformers.get_scheduler("cosine", optimiser, num_warmup_steps=1, num_training_steps=steps)
    for step in range(steps):
        part = slice(step * batch, (step + 1) * batch)
        inside = {**inputs, **{name: inputs[name][part] for name in ("input_ids", "mask", "labels")}}
        optimiser.zero_grad()
        with true_float64():
            loss = _weighted_loss(classify(model, trainable, inside["input_ids"], inside["mask"], scalars["pooling"]), inside)
            loss.backward()
            norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in trainable.values()])
            for parameter in trainable.values():
                parameter.grad *= min(1.0, 0.5 / norm.item())
        optimiser.step()
        schedule.step()
        _assert_close(outputs["losses"][step], loss, 1e-11, "loss")
        _assert_close(outputs["norms"][step], norm, 1e-10, "norm")
    for name, parameter in trainable.items():
        # Adam divides by the gradient's own size, so that a small entry's relative error comes through: 1e-14 / 1e-5.
        _assert_close(outputs[f"trainable/{name}"], parameter, 1e-9, name)
        for moment in ("exp_avg", "exp_avg_sq"):
            _assert_close(outputs[f"{moment}/{name}"], optimiser.state[parameter][moment], 1e-10, f"{moment}/{name}")


def test_the_trace_has_the_paths_of_the_modules() -> None:
    scalars = {"family": "qwen3", "vocab": 5, "hidden": 4, "intermediate": 6, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 2}
    scalars |= {"eps": 1e-6, "theta": 1e4, "classes": 2, "rank": 1, "alpha": 2.0, "pooling": "mean", "nf4": True}
    random = np.random.default_rng(0)
    parameters = _parameters(random, classifier.parameter_shapes(scalars))
    tape = record(
        "classifier_loss",
        {"input_ids": np.array([[1, 2]]), "mask": np.ones((1, 2), bool), "labels": np.array([1]), **_flat(parameters)},
        scalars,
    )
    layer = "model.layers.0"
    projections = ["q_proj", "q_norm", "q_rope", "k_proj", "k_norm", "k_rope", "v_proj", "attention", "o_proj"]
    expected = ["model.embed_tokens", f"{layer}.input_layernorm", *(f"{layer}.self_attn.{name}" for name in projections)]
    expected += [f"{layer}.attention_residual", f"{layer}.post_attention_layernorm"]
    expected += [f"{layer}.mlp.{name}" for name in ("gate_proj", "up_proj", "swiglu", "down_proj")]
    expected += [f"{layer}.mlp_residual", "model.norm", "pool", "score", "loss"]
    calls = [call for call in tape.calls if not call.operation.startswith("nf4")]
    assert [call.path for call in calls] == expected
    assert {call.path.rpartition(".")[2] for call in calls if call.operation == "lora_linear"} == {"q_proj", "v_proj"}
    nf4 = [call.path for call in tape.calls if call.operation.startswith("nf4")]
    assert nf4[:2] == [f"{layer}.self_attn.q_proj.weight.nf4", f"{layer}.self_attn.q_proj.weight.dequantized"]
    assert len(nf4) == 14
