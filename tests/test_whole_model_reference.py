"""The reference of whole classifiers by layer: equal to the composition, and with one block's weights at a time."""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from blackswan import reference
from blackswan.falsifiers.numeric.generators import generator_for, model_parameter
from blackswan.falsifiers.numeric.whole_model import by_layer, model
from blackswan.reference.by_layer import ByLayer, widened
from blackswan.reference.classifier import NF4_BLOCK, parameter_shapes, trainable_names
from blackswan.reference.nf4 import quantize
from blackswan.reference.operations import TABLE
from blackswan.reference.table import Operation, Table

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
    """Widens and dequantises as the reference does, and knows of which blocks a wide weight is still alive."""

    def __init__(self) -> None:
        self.alive: dict[int, str] = {}
        self.most: set[str] = set()
        self.seen = 0

    def widened_of(self, name: str, stored: np.ndarray) -> np.ndarray:
        return self.note(".".join(name.split(".")[:3]), widened(stored))

    def note(self, part: str, wide: np.ndarray) -> np.ndarray:
        self.alive[id(wide)] = part
        weakref.finalize(wide, self.alive.pop, id(wide))
        self.seen += 1
        blocks = {block for block in self.alive.values() if block.startswith("model.layers.")}
        self.most = max(self.most, blocks, key=len)
        return wide

    def table_of(self, part: str) -> Table:
        dequantize = TABLE["nf4_dequantize"]
        noted = Operation(lambda **given: self.note(part, dequantize.forward(**given)), None, dequantize.outputs)
        return {**TABLE, "nf4_dequantize": noted}


class Stored(Mapping[str, np.ndarray]):
    """Parameters that remember which one was asked for last, which is the next that is widened."""

    def __init__(self, parameters: Mapping[str, np.ndarray]) -> None:
        self.parameters, self.asked = parameters, ""

    def __getitem__(self, name: str) -> np.ndarray:
        self.asked = name
        return self.parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)


@pytest.mark.parametrize("nf4", [False, True])
def test_one_block_is_wide_at_a_time(nf4: bool) -> None:
    inputs, parameters, scalars = problem(layers=5, nf4=nf4)
    held, stored = Held(), Stored(parameters)
    ByLayer(inputs, stored, scalars, held.table_of, hold=lambda value: held.widened_of(stored.asked, value)).run()
    in_blocks = sum(name.startswith("model.layers.") for name in parameters) + 7 * 5 * nf4
    assert held.seen == 2 * in_blocks + 4, "the weights of the blocks in both passes; the embedding, the final norm and the head once"
    assert len(held.most) == 1
    assert not held.alive


def test_a_block_runs_once() -> None:
    inputs, parameters, scalars = problem(targets="q_v")
    ran: list[str] = []

    def counted(name: str, entry: Operation) -> Operation:
        def forward(**given: Any) -> Any:
            ran.append(name)
            return entry.forward(**given)

        return Operation(forward, entry.backward, entry.outputs)

    ByLayer(inputs, parameters, scalars, lambda _: {name: counted(name, entry) for name, entry in TABLE.items()}).run()
    counts = {name: ran.count(name) for name in ("linear", "lora_linear", "attention", "swiglu", "rms_norm")}
    assert counts == {"linear": 3 * 5 + 1, "lora_linear": 3 * 2, "attention": 3, "swiglu": 3, "rms_norm": 3 * 2 + 1}


@pytest.mark.parametrize("replay", [None, 0])
def test_both_passes_have_the_same_nf4_weights_under_rounding(replay: int | None) -> None:
    rounded = by_layer(replace(model("qwen2.5-0.5b", 0, true_size=False), nf4=True, targets="q_v"), "bfloat16", replay)
    passes: dict[str, list[np.ndarray]] = {"forward": [], "backward": []}

    def noted(entry: Operation) -> Operation:
        def forward(**given: Any) -> Any:
            passes["forward"].append(given["weight"])
            return entry.forward(**given)

        def backward(*cotangents: np.ndarray, **given: Any) -> dict[str, np.ndarray]:
            passes["backward"].append(given["weight"])
            return entry.backward(*cotangents, **given)

        return Operation(forward, backward, entry.outputs)

    def table_of(part: str) -> Table:
        table = rounded.table_of(part)
        return {**table, **{name: noted(entry) for name in ("linear", "lora_linear") if isinstance(entry := table[name], Operation)}}

    replace(rounded, table_of=table_of).run()
    forward, backward = ({weight.tobytes() for weight in weights} for weights in passes.values())
    assert len(forward) == 3 * 7 + 1
    assert len(backward) == 3 * 7, "all but the keys' projection of the first block, which leads to nothing trained"
    assert backward < forward


@pytest.mark.parametrize("nf4", [False, True])
def test_values_that_are_stored_in_less_are_widened(nf4: bool) -> None:
    inputs, parameters, scalars = problem(nf4=nf4, targets="all")
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in parameters.items()}
    expected = ByLayer(inputs, {name: widened(value) for name, value in stored.items()}, scalars).run()
    for name, value in ByLayer(inputs, stored, scalars).run().items():
        assert value.dtype == np.float64
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_projections_are_widened_as_they_are_read_each_over_the_last() -> None:
    inputs, parameters, scalars = problem(targets="all")
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in parameters.items()}
    asked: list[tuple[str, np.dtype[Any], int]] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def note(*cotangents: np.ndarray, **given: Any) -> Any:
            asked.append((name, given["weight"].dtype, given["weight"].__array_interface__["data"][0]))
            return function(*cotangents, **given)

        return note

    def table_of(part: str) -> Table:
        if not part.startswith("model.layers."):
            return TABLE
        entries = {name: TABLE[name] for name in ("linear", "lora_linear")}
        assert all(isinstance(entry, Operation) and entry.backward for entry in entries.values())
        return {
            **TABLE,
            **{name: Operation(noted("forward", entry.forward), noted("backward", entry.backward)) for name, entry in entries.items()},
        }

    expected = ByLayer(inputs, stored, scalars).run()
    layers = ByLayer(inputs, stored, scalars, table_of)
    for name, value in layers.run().items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert Counter(name for name, _, _ in asked) == {"forward": 7 * scalars["layers"], "backward": 7 * scalars["layers"]}
    assert {dtype for _, dtype, _ in asked} == {np.dtype(np.float64)}
    assert len({place for _, _, place in asked[-7:]}) == 1, "in the largest room that was needed"
    tape = layers.block(0, layers.embedded())
    late = {name: value for name, value in tape.values.items() if name.endswith("_proj.weight")}
    assert len(late) == 7
    assert all(value is stored[name] for name, value in late.items())


@dataclass(frozen=True)
class Doubled(Operation):
    """An operation with a rule of its own for both passes."""

    def run(self, arguments: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: 2 * value for name, value in super().run(arguments).items()}

    def gradients(self, cotangents: Collection[np.ndarray], arguments: Mapping[str, Any], needs: Collection[str]) -> dict[str, np.ndarray]:
        return {name: 2 * value for name, value in super().gradients(cotangents, arguments, needs).items()}


def test_an_operation_with_passes_of_its_own_keeps_them_whatever_its_weights_are_stored_in() -> None:
    inputs, parameters, scalars = problem(targets="q_v")
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in parameters.items()}
    linear = TABLE["linear"]
    table = {**TABLE, "linear": Doubled(linear.forward, linear.backward)}
    early = ByLayer(inputs, stored, scalars, lambda _: table, hold=lambda value: widened(value)).run()
    for name, value in ByLayer(inputs, stored, scalars, lambda _: table).run().items():
        np.testing.assert_array_equal(value, early[name], err_msg=name)


def test_two_threads_may_run_one_classifier() -> None:
    inputs, parameters, scalars = problem(hidden=128, intermediate=256, head_dim=32)
    layers = ByLayer(inputs, {name: value.astype(np.float32) for name, value in parameters.items()}, scalars)
    expected = layers.run()
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: layers.run(), range(8)):
            assert all(np.array_equal(found[name], value) for name, value in expected.items())


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
