"""Precision policies and conventions: honest code that declares them holds, wrong code does not, and a verdict says what would help."""

import importlib
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from falsifiers_claims import CLAIMS
from torch import Tensor
from torch.nn import functional

import blackswan
from blackswan import contracts, reference
from blackswan.contracts.conventions import alternatives, choices, shared_out
from blackswan.falsifiers.numeric.precision import rounded_table
from blackswan.falsifiers.numeric.rounding import Stored
from blackswan.falsifiers.runner import vet
from blackswan.falsifiers.runner.engine import Options, falsify, would_hold_with
from blackswan.falsifiers.runner.verdict import State, Verdict
from blackswan.falsifiers.subjects.functions import Functions
from blackswan.falsifiers.subjects.named import subject_of
from blackswan.falsifiers.subjects.reference import ReferenceSubject

STORED = {"intermediates": "storage"}
TORCH_LOSS = {**STORED, "loss_dtype": "storage"}


def asked(claim: str, function: Callable[..., Any], dtype: str = "bfloat16", **declared: str) -> Verdict:
    operation = CLAIMS[claim].operation
    subject = Functions({operation: blackswan.declare(function, **declared)}, "tried")
    return falsify(anywhere(claim), dtype, subject, Options(shrink=False))


def anywhere(claim: str) -> contracts.Claim:
    return replace(CLAIMS[claim], domain=replace(CLAIMS[claim].domain, device=()))


def helps(claim: str, function: Callable[..., Any], dtype: str = "bfloat16") -> Any:
    operation = CLAIMS[claim].operation
    found = asked(claim, function, dtype)
    assert found.state is State.FALSIFIED
    assert found.case is not None
    return would_hold_with(anywhere(claim), found.case, Functions({operation: function}, "tried"), Options())


def theirs(package: str, name: str) -> Callable[..., Any]:
    """A library's function for an operation."""
    pytest.importorskip(package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Callable[..., Any] = importlib.import_module(f"blackswan.falsifiers.subjects.libraries.{package}").OPERATIONS[name]
    return found


HONEST: list[tuple[str, Callable[[], Callable[..., Any]], dict[str, str]]] = [
    ("OP-SOFTMAX-GRADIENT", lambda: theirs("torch", "softmax"), STORED),
    ("LOSS-CE", lambda: theirs("torch", "weighted_cross_entropy"), {"reduction": "weights", "loss_dtype": "storage"}),
    ("LOSS-CE-GRADIENT", lambda: theirs("torch", "weighted_cross_entropy"), {**STORED, "reduction": "weights"}),
    ("LOSS-BCE", lambda: theirs("torch", "bce_with_logits"), {"loss_dtype": "storage"}),
    ("KERNEL-RMSNORM", lambda: theirs("transformers", "rms_norm"), STORED),
    ("OP-QKNORM", lambda: theirs("transformers", "qk_norm"), STORED),
    ("OP-ROPE-GRADIENT", lambda: theirs("transformers", "rope"), STORED),
]


@pytest.mark.parametrize(("claim", "function", "declared"), HONEST, ids=[claim for claim, _, _ in HONEST])
def test_honest_code_holds_with_its_declaration_and_is_told_so_without(
    claim: str, function: Callable[[], Callable[..., Any]], declared: dict[str, str]
) -> None:
    assert asked(claim, function(), **declared).state is State.HELD
    assert helps(claim, function()) == declared


def test_what_is_declared_holds_on_the_gradients_too() -> None:
    assert asked("OP-RMSNORM", theirs("transformers", "rms_norm"), **STORED).state is State.HELD
    assert asked("OP-QKNORM-GRADIENT", theirs("transformers", "qk_norm"), **STORED).state is State.HELD
    assert asked("LOSS-BCE-GRADIENT", theirs("torch", "bce_with_logits"), **TORCH_LOSS).state is State.HELD
    assert asked("LOSS-CE-GRADIENT-ROWS", theirs("torch", "weighted_cross_entropy"), reduction="weights", **TORCH_LOSS).state is State.HELD
    assert asked("LOSS-CE-WEIGHTS-SCALE", theirs("torch", "weighted_cross_entropy"), "float32", reduction="weights").state is State.HELD
    assert asked("LOSS-CE-BATCH", theirs("torch", "weighted_cross_entropy"), "float32", reduction="weights").state is State.HELD


def test_a_convention_of_one_operation() -> None:
    known = contracts.load_operations()
    every = shared_out({name: known[name] for name in ("softmax", "rms_norm")}, {**STORED, "softmax.intermediates": "float32"})
    assert every == {"softmax": {"intermediates": "float32"}, "rms_norm": STORED}
    with pytest.raises(ValueError, match="no operation 'soft' here; expected one of softmax"):
        shared_out({"softmax": known["softmax"]}, {"soft.intermediates": "storage"})
    with pytest.raises(ValueError, match="softmax has no convention 'eps'"):
        shared_out({"softmax": known["softmax"]}, {"softmax.eps": "storage"})


def test_clipping_with_an_epsilon() -> None:
    assert asked("OPT-CLIP", theirs("torch", "clip_by_global_norm"), "float32", eps="1e-6").state is State.HELD
    assert helps("OPT-CLIP", theirs("torch", "clip_by_global_norm"), "float32") == {"eps": "1e-6"}


def epsilon_outside_the_root(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide / (wide.square().mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype) * weight


def smoothed(logits: Tensor, labels: Tensor, class_weights: Tensor | None = None) -> Tensor:
    return functional.cross_entropy(logits, labels, class_weights, label_smoothing=0.1)


def angles_in_storage(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    half = x.shape[-1] // 2
    frequency = (theta ** (torch.arange(half) * (-1.0 / half))).to(x.dtype)
    angle = positions.to(x.dtype)[..., None, None] * frequency
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


@pytest.mark.parametrize(
    ("claim", "wrong"),
    [("OP-RMSNORM", epsilon_outside_the_root), ("LOSS-CE", smoothed), ("LOSS-CE-GRADIENT", smoothed), ("OP-ROPE", angles_in_storage)],
)
def test_a_bug_stays_falsified_whatever_is_declared(claim: str, wrong: Callable[..., Any]) -> None:
    operation = CLAIMS[claim].operation
    for declared in alternatives(contracts.load_operations()[operation], narrow=True):
        assert asked(claim, wrong, **declared).state is State.FALSIFIED, declared
    assert helps(claim, wrong) is None


@pytest.mark.parametrize(
    ("claim", "dtype", "declared"),
    [
        ("LOSS-CE", "float32", {"reduction": "weights"}),
        ("LOSS-BCE", "bfloat16", {"loss_dtype": "storage"}),
        ("OPT-CLIP", "float32", {"eps": "1e-6"}),
    ],
)
def test_a_wrong_declaration_is_falsified(claim: str, dtype: str, declared: dict[str, str]) -> None:
    class Declaring(ReferenceSubject):
        def declares(self, operation: str) -> dict[str, str]:
            return declared if operation == CLAIMS[claim].operation else {}

    assert falsify(CLAIMS[claim], dtype, ReferenceSubject(), Options("quick")).state is State.HELD
    assert falsify(CLAIMS[claim], dtype, Declaring(), Options("quick", shrink=False)).state is State.FALSIFIED


def test_every_convention_with_a_formula_of_its_own_is_one_that_the_contract_names() -> None:
    signatures = contracts.load_operations()
    for operation, name, value in reference.operations.CONVENTIONS:
        assert value in choices(signatures[operation])[name][1:]


def test_each_step_is_rounded_and_what_comes_of_no_stored_value_enters_rounded() -> None:
    stored = Stored.of(np.array([1.0, 3.0], np.float32), np.dtype(ml_dtypes.bfloat16), 2.0**-8)
    third = stored / np.float32(3.0)
    assert isinstance(third, Stored)
    for value in (third, stored * np.array([1 / 3, 1.0], np.float32), np.exp(stored), (stored / 3).sum(), np.mean(stored / 3)):
        assert np.array_equal(value, np.asarray(value).astype(ml_dtypes.bfloat16).astype(np.float32))
    third *= 1.01
    assert np.array_equal(third, np.asarray(third).astype(ml_dtypes.bfloat16).astype(np.float32))
    assert np.array_equal(np.maximum(stored, 0.0), stored)


def test_a_step_that_overflows_is_not_rounded() -> None:
    stored = Stored.of(np.array([300.0, 1.0], np.float32), np.dtype(np.float16), 2.0**-11)
    assert np.array_equal(stored * stored, [90_000.0, 1.0])


def test_a_declaration_changes_the_rounding_of_its_own_operation_only_and_none_in_float32() -> None:
    x = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    for dtype, operation, same in (("bfloat16", "softmax", False), ("bfloat16", "swiglu", True), ("float32", "softmax", True)):
        plain, declared = rounded_table(reference.TABLE, dtype), rounded_table(reference.TABLE, dtype, declared={operation: STORED})
        found = [reference.evaluate("softmax", {"x": x}, {}, table)["y"] for table in (plain, declared)]
        assert np.array_equal(*found) is same


def test_unknown_names_and_values_are_refused_with_the_closed_list() -> None:
    for declared, message in (
        ({"rounding": "once"}, r"rms_norm has no convention 'rounding'; it has intermediates"),
        ({"intermediates": "half"}, r"rms_norm: intermediates is 'half'; expected one of float32, storage"),
    ):
        with pytest.raises(ValueError, match=message):
            Functions({"rms_norm": blackswan.declare(theirs("torch", "rms_norm"), **declared)}, "tried")
    with pytest.raises(ValueError, match=r"none of softmax has a convention 'reduction'; expected one of intermediates"):
        subject_of(theirs("torch", "softmax"), "tried", declared={"reduction": "weights"})
    with pytest.raises(ValueError, match="declares by its method `declares`"):
        subject_of(ReferenceSubject(), "tried", declared=STORED)


def test_a_function_and_a_module_keep_working_and_add_up_what_they_declare() -> None:
    module = blackswan.declare(blackswan.declare(torch.nn.Softmax(-1), intermediates="float32"), **STORED)
    assert torch.equal(module(torch.zeros(1, 2)), torch.full((1, 2), 0.5))
    subject = Functions({"softmax": module, "swiglu": theirs("torch", "swiglu")}, "tried")
    assert (subject.declares("softmax"), subject.declares("swiglu")) == (STORED, {})


def test_vet_takes_declarations_and_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("mine.py").write_text(
        "import blackswan, torch\n"
        "def loss(logits, labels, class_weights=None):\n"
        "    return torch.nn.functional.cross_entropy(logits, labels, class_weights)\n"
        "declared = blackswan.declare(loss, reduction='weights')\n"
    )
    only = ["--operation", "weighted_cross_entropy", "--claim", "LOSS-CE-WEIGHTS-SCALE", "--dtype", "float32", "--json"]

    def reason(*arguments: str) -> tuple[int, str, str]:
        status = vet.main([*arguments, *only])
        (record,) = json.loads(capsys.readouterr().out)
        return status, record["state"], record["reason"]

    assert reason("mine.py:loss") == (1, "FALSIFIED", "would hold with reduction: weights")
    assert reason("mine.py:loss", "--declare", "reduction=weights") == (0, "HELD", "declared reduction: weights")
    assert reason("mine.py:declared") == (0, "HELD", "declared reduction: weights")
    assert vet.main(["mine.py:loss", "--declare", "reduction=none", *only]) == vet.EXIT_USAGE
    assert "expected one of samples, weights" in capsys.readouterr().err
