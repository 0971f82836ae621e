"""The subject `impl` against the reference in float64: models, gradients, training, and the trace of the real model call by call."""

import inspect
from typing import Any

import numpy as np
import pytest

from blackswan import reference
from blackswan.falsifiers.numeric.precision import signatures
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.impl.dispatch import OUTPUTS
from blackswan.impl.operations import OPERATIONS
from blackswan.reference.classifier import parameter_shapes
from blackswan.reference.table import Array

MASK = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=bool)
IMPL = Implementation()


def scalars(family: str, nf4: bool) -> dict[str, Any]:
    sizes = {"vocab": 11, "hidden": 12, "intermediate": 20, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 6, "classes": 3, "rank": 2}
    choices = {"targets": "all" if family == "llama" else "q_v", "pooling": "last", "nf4": nf4}
    return {**sizes, **choices, "family": family, "eps": 1e-5, "theta": 1e4, "tied": family != "llama", "alpha": 5.0}


def inputs(settings: dict[str, Any]) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    values = {
        f"parameters/{name}": (0.3 * rng.standard_normal(shape) + name.endswith("norm.weight")).astype(np.float32).astype(np.float64)
        for name, shape in parameter_shapes(settings).items()
    }
    return values | {"input_ids": rng.integers(0, 11, (4, 5)), "mask": MASK, "labels": np.array([0, 2, 1, 1])}


OF_OTHERS = {"adamw_8bit_step"}
"""Operations that only subjects of others have."""


def test_every_elementary_operation_has_its_signature() -> None:
    elementary = {name: entry for name, entry in signatures().items() if not entry.composition and name not in OF_OTHERS}
    assert elementary.keys() == OPERATIONS.keys()
    for name, entry in elementary.items():
        taken = inspect.signature(OPERATIONS[name]).parameters
        others = {each for each, parameter in taken.items() if parameter.kind is inspect.Parameter.VAR_KEYWORD}
        optional = {each for each, scalar in entry.scalars.items() if scalar.default is not None} if others else set()
        # the storage dtype of a weight is not to be seen in codes and absmax
        assert taken.keys() - {"dtype"} - others == {*entry.inputs, *entry.scalars, *entry.attributes} - optional, name
        assert OUTPUTS.get(name, ("y",)) == tuple(entry.outputs), name


def test_the_trace_lines_up_with_the_references_call_by_call() -> None:
    settings = scalars("llama", nf4=True)
    given = inputs(settings)
    calls = {call.path: call for call in IMPL.record("classifier_loss", given, settings, "float64", {"loss": np.array(1.0)})}
    tape = reference.record("classifier_loss", given, settings)
    gradients = tape.backward({"loss": np.array(1.0)})
    assert [call.path for call in tape.calls if call.path not in calls] == []
    for call in tape.calls:
        ours = calls[call.path]
        for name, value in call.results.items():
            np.testing.assert_allclose(ours.outputs[name], tape.values[value].reshape(ours.outputs[name].shape), rtol=1e-9, atol=1e-12)
            if name in ours.cotangents:
                np.testing.assert_allclose(
                    ours.cotangents[name], gradients[value].reshape(ours.cotangents[name].shape), rtol=1e-9, atol=1e-12
                )
    assert sum(bool(call.cotangents) for call in calls.values()) > 30


def test_what_impl_does_not_have_is_said() -> None:
    assert IMPL.unsupported("rms_norm", "bfloat16") is None
    assert "float16" in str(IMPL.unsupported("rms_norm", "float16"))
    assert "fuse" in str(IMPL.unsupported("fuse", "float32"))
    settings = scalars("qwen2", nf4=False)
    incomplete = {name: value for name, value in inputs(settings).items() if name != "parameters/model.norm.weight"}
    with pytest.raises(ValueError, match=r"no tensor 'model\.norm\.weight'"):
        IMPL.run("classifier_forward", incomplete, settings, "float32")
