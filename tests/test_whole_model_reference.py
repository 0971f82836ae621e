"""The reference of whole classifiers by layer: equal to the composition, and with one block's weights at a time."""

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import reference
from falsifiers.fill import generator_for, model_parameter
from reference.by_layer import ByLayer, widened
from reference.classifier import NF4_BLOCK, parameter_shapes, trainable_names
from reference.nf4 import quantize

SIZES = {"vocab": 23, "hidden": 16, "intermediate": 24, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 4, "classes": 3, "rank": 2}
SCALARS: dict[str, Any] = {**SIZES, "eps": 1e-6, "theta": 1e4, "alpha": 4.0}


def problem(**scalars: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """Inputs, parameters and scalars of a small classifier."""
    asked = {**SCALARS, "family": "qwen2", "pooling": "mean", **scalars}
    random = np.random.default_rng(5)
    mask = np.arange(6)[None, :] < np.array([6, 3, 1])[:, None]
    inputs = {"input_ids": random.integers(0, 23, (3, 6)), "mask": mask, "labels": np.array([0, 2, 1])}
    shapes = parameter_shapes(asked)
    return inputs, {name: model_parameter(name, shape, "normal", generator_for(3, name)) for name, shape in shapes.items()}, asked


def whole(inputs: Mapping[str, np.ndarray], parameters: Mapping[str, np.ndarray], scalars: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The same outputs from one tape."""
    given = {**inputs, **{f"parameters/{name}": value for name, value in parameters.items()}}
    tape = reference.record("classifier_loss", given, scalars)
    states = {"model.embed_tokens": "model.embed_tokens", "model.norm": "model.norm"}
    states |= {f"model.layers.{index}": f"model.layers.{index}.mlp_residual" for index in range(scalars["layers"])}
    gradients = reference.differentiate("classifier_loss", given, scalars, {"loss": np.ones(())}, ["trainable"])
    found = {f"hidden/{name}": tape.values[value] for name, value in states.items()} | tape.result()
    return found | {name.replace("parameters/", "gradient/"): value for name, value in gradients.items()}


@pytest.mark.parametrize("nf4", [False, True])
@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
@pytest.mark.parametrize(("family", "targets"), [("llama", "q_v"), ("qwen2", "all"), ("qwen3", "q_v")])
def test_is_the_composition(family: str, targets: str, pooling: str, nf4: bool) -> None:
    inputs, parameters, scalars = problem(family=family, targets=targets, pooling=pooling, nf4=nf4)
    inputs["class_weights"] = np.array([0.5, 1.0, 1.5])
    expected, found = whole(inputs, parameters, scalars), ByLayer(inputs, parameters, scalars).run()
    assert found.keys() == expected.keys()
    assert {name.removeprefix("gradient/") for name in found if name.startswith("gradient/")} == set(trainable_names(scalars))
    for name, value in expected.items():
        assert found[name].dtype == np.float64
        assert np.abs(found[name] - value).max() <= 1e-12 * np.abs(value).max(), name


def test_takes_several_labels_a_sample() -> None:
    inputs, parameters, scalars = problem()
    inputs["labels"] = np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    expected, found = whole(inputs, parameters, scalars), ByLayer(inputs, parameters, scalars).run()
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-12 * np.abs(value).max(), name


def test_codes_stand_for_weights_that_are_quantised_each_time() -> None:
    inputs, parameters, scalars = problem(nf4=True)
    stored = dict(parameters)
    for name in parameters:
        if name.endswith("_proj.weight"):
            codes, absmax = quantize(stored.pop(name), NF4_BLOCK)
            stored |= {f"{name}.nf4.codes": codes, f"{name}.nf4.absmax": absmax}
    expected, found = ByLayer(inputs, parameters, scalars).run(), ByLayer(inputs, stored, scalars).run()
    assert all(np.array_equal(found[name], value) for name, value in expected.items())


class Held:
    """Widens as the reference does, and knows of which blocks a wide weight is still alive."""

    def __init__(self) -> None:
        self.alive: dict[int, str] = {}
        self.most: set[str] = set()
        self.asked = ""

    def __call__(self, stored: np.ndarray) -> np.ndarray:
        wide = widened(stored)
        self.alive[id(wide)] = self.asked
        weakref.finalize(wide, self.alive.pop, id(wide))
        blocks = {block for block in self.alive.values() if block.startswith("model.layers.")}
        self.most = max(self.most, blocks, key=len)
        return wide


class Stored(Mapping[str, np.ndarray]):
    """Parameters that tell `held` which block the next one widened belongs to."""

    def __init__(self, parameters: Mapping[str, np.ndarray], held: Held) -> None:
        self.parameters, self.held = parameters, held

    def __getitem__(self, name: str) -> np.ndarray:
        self.held.asked = ".".join(name.split(".")[:3])
        return self.parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


def test_one_block_is_wide_at_a_time() -> None:
    inputs, parameters, scalars = problem(layers=5)
    held = Held()
    ByLayer(inputs, Stored(parameters, held), scalars, hold=held).run()
    assert len(held.most) == 1
    assert not held.alive


def test_only_the_rows_of_the_embedding_that_occur_are_widened() -> None:
    inputs, parameters, scalars = problem()
    wide: list[tuple[int, ...]] = []

    def hold(stored: np.ndarray) -> np.ndarray:
        wide.append(stored.shape)
        return widened(stored)

    ByLayer(inputs, parameters, scalars, hold=hold).run()
    assert wide[0] == (len(np.unique(inputs["input_ids"])), SIZES["hidden"])
    assert (SIZES["vocab"], SIZES["hidden"]) not in wide


def test_says_what_is_wrong_with_a_parameter() -> None:
    inputs, parameters, scalars = problem()
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=rf"'{name}' is missing"):
        ByLayer(inputs, {key: value for key, value in parameters.items() if key != name}, scalars).run()
    with pytest.raises(ValueError, match=r"up_proj.weight' has shape \[16, 24\]; expected \[24, 16\]"):
        ByLayer(inputs, {**parameters, name: parameters[name].T}, scalars).run()
    with pytest.raises(ValueError, match=r"input_ids hold -1 to .*; expected 0 to 22"):
        ByLayer({**inputs, "input_ids": inputs["input_ids"] - inputs["input_ids"].min() - 1}, parameters, scalars).run()
