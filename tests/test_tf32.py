"""TF32 as a policy beside the dtypes: its rounding, its noise floor, what it holds and what it kills, and where it runs."""

import math
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from falsifiers_claims import CLAIMS, LOADED

from blackswan import reference
from blackswan.falsifiers import mutants
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.mutants import power
from blackswan.falsifiers.numeric.precision import compute_dtype, rounded_table
from blackswan.falsifiers.numeric.rounding import OPERAND_ROUNDOFF, Tf32, to_tf32
from blackswan.falsifiers.runner.campaign import Campaign, Selection
from blackswan.falsifiers.runner.engine import Options, falsify
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects import implementation
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.subjects.protocol import Subject
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.falsifiers.subjects.tf32 import Tf32Emulation
from blackswan.reference.table import Array

IN_TF32 = [claim for claim in CLAIMS.values() if "tf32" in claim.domain.dtype]
TRIED = ("OP-LINEAR", "OP-LINEAR-GRADIENT", "OP-ATTENTION", "LORA-LINEAR-GRADIENT", "FWD-DECODER", "CLS-GRADIENT", "CLS-STEP")


def to_bfloat16(operand: torch.Tensor) -> torch.Tensor:
    return operand.bfloat16().float()


def normal(*shape: int) -> Array:
    return np.asarray(np.random.default_rng(len(shape)).standard_normal(shape), np.float32)


def test_operands_are_rounded_to_ten_bits_to_nearest_even() -> None:
    values = (normal(20_000).astype(np.float64) * 10.0 ** np.random.default_rng(1).uniform(-30, 30, 20_000)).astype(np.float32)
    mantissa, exponent = np.frexp(values.astype(np.float64))
    np.testing.assert_array_equal(to_tf32(values), np.ldexp(np.rint(mantissa * 2**11), exponent - 11).astype(np.float32))
    ties = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, -(1 + 2.0**-11)], np.float32)
    np.testing.assert_array_equal(to_tf32(ties), np.array([1, 1 + 2.0**-9, -1], np.float32))
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, np.finfo(np.float32).max], np.float32)
    np.testing.assert_array_equal(to_tf32(odd), np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, np.inf], np.float32))
    np.testing.assert_array_equal(to_tf32(odd.astype(np.float64)), odd)


def test_a_product_rounds_both_operands_whichever_of_them_knows() -> None:
    a, b = normal(5, 7), normal(7, 3)
    expected = to_tf32(a) @ to_tf32(b)
    for left, right in ((Tf32.of(a), b), (a, Tf32.of(b)), (Tf32.of(a)[:], b), (Tf32.of(a.T.copy()).T, Tf32.of(b))):
        np.testing.assert_array_equal(np.asarray(left @ right), expected)
    assert not np.array_equal(expected, a @ b)
    np.testing.assert_array_equal(np.asarray(np.exp(Tf32.of(a)) * 2 + a.sum()), np.exp(a) * 2 + a.sum())


def test_a_replay_moves_operands_that_tf32_holds_exactly_by_a_unit() -> None:
    left, right = np.full((400, 1), 1.5, np.float32), np.full((1, 1), 1.25, np.float32)
    moved = np.asarray(Tf32.of(left, np.random.default_rng(0)) @ right, np.float64) / (1.5 * 1.25) - 1
    # Each of the two operands by a unit, and by another one when it is rounded.
    assert OPERAND_ROUNDOFF / 2 < moved.std() < np.abs(moved).max() < 4.01 * OPERAND_ROUNDOFF
    np.testing.assert_array_equal(np.asarray(Tf32.of(left) @ right), left @ right)


def rounded(operation: str, dtype: str, **arguments: Any) -> Mapping[str, Array]:
    return reference.evaluate(
        operation,
        {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)},
        {name: value for name, value in arguments.items() if not isinstance(value, np.ndarray)},
        rounded_table(reference.TABLE, dtype),
    )


def test_the_reference_rounds_every_operand_of_lora() -> None:
    x, weight, a, b = normal(6, 8), normal(5, 8), normal(2, 8), normal(5, 2)
    r = to_tf32
    expected = r(x) @ r(weight).T + np.float32(1.5) * (r(r(x) @ r(a).T) @ r(b).T)
    np.testing.assert_array_equal(rounded("lora_linear", "tf32", x=x, weight=weight, lora_a=a, lora_b=b, alpha=3.0)["y"], expected)


def test_the_reference_rounds_every_operand_of_attention_and_of_its_gradient() -> None:
    q, k, v, dy = (normal(1, 4, 1, 8) * np.float32(scale) for scale in (1.0, 0.7, 1.3, 0.9))
    mask, r = np.ones((1, 4), bool), to_tf32
    queries, keys, values, upstream = (array[0, :, 0] for array in (q, k, v, dy))
    scores = np.where(np.tri(4, dtype=bool), r(queries) @ r(keys).T / math.sqrt(8), -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    y = r(weights) @ r(values)
    np.testing.assert_allclose(rounded("attention", "tf32", q=q, k=k, v=v, mask=mask)["y"], y[None, :, None], rtol=1e-6)
    scores_gradient = weights * (r(upstream) @ r(values).T - (upstream * y).sum(axis=1, keepdims=True)) / math.sqrt(8)
    expected = {"q": r(scores_gradient) @ r(keys), "k": r(scores_gradient).T @ r(queries), "v": r(weights).T @ r(upstream)}
    inputs = {"q": q, "k": k, "v": v, "mask": mask}
    found = reference.differentiate("attention", inputs, {}, {"y": dy}, list(expected), rounded_table(reference.TABLE, "tf32"))
    for name, gradient in expected.items():
        # The order of sums in float32 is free, and one that is rounded the other way to TF32 is off by a unit of an operand.
        np.testing.assert_allclose(found[name][0, :, 0], gradient, rtol=1e-5, atol=1e-4 * np.abs(gradient).max(), err_msg=name)


def test_what_has_no_product_is_as_in_float32() -> None:
    arguments = {"gate": normal(4, 9), "up": normal(4, 9)}
    np.testing.assert_array_equal(rounded("swiglu", "tf32", **arguments)["y"], rounded("swiglu", "float32", **arguments)["y"])
    assert compute_dtype("tf32") == np.float32


@pytest.mark.parametrize("name", TRIED)
def test_torch_with_rounded_operands_is_held(name: str) -> None:
    held(name, Tf32Emulation())


@pytest.mark.parametrize("name", ["OP-LINEAR-GRADIENT", "FWD-DECODER"])
def test_the_reference_under_the_policy_is_held(name: str) -> None:
    held(name, ReferenceSubject())


def held(name: str, subject: Subject) -> None:
    verdict = falsify(CLAIMS[name], "tf32", subject, Options(effort="quick", seed=3))
    assert verdict.state is State.HELD, (verdict.reason, verdict.comparison)


@pytest.mark.parametrize("name", TRIED)
def test_operands_in_bfloat16_are_falsified(name: str) -> None:
    assert falsify(CLAIMS[name], "tf32", Tf32Emulation(to_bfloat16), Options(shrink=False)).state is State.FALSIFIED


class Always(Tf32Emulation):
    """TF32 whether or not it was asked for."""

    @contextmanager
    def _products(self, dtype: str) -> Any:
        del dtype
        with super()._products("tf32"):
            yield


@pytest.mark.parametrize("name", ["OP-LINEAR", "FWD-DECODER", "CLS-GRADIENT"])
def test_tf32_that_nobody_asked_for_is_falsified(name: str) -> None:
    assert falsify(CLAIMS[name], "float32", Always(to_tf32), Options(effort="quick", shrink=False)).state is State.FALSIFIED


@pytest.mark.parametrize("name", ["OP-LINEAR", "OP-LINEAR-GRADIENT", "LORA-LINEAR-GRADIENT", "BWD-DECODER"])
def test_wrong_programs_are_killed_under_the_policy(name: str) -> None:
    claim = CLAIMS[name]
    wrong = [mutant for mutant in claim.must_catch if mutant not in mutants.STEPS]  # those are of `impl`, whose TF32 a GPU alone has
    cells = list(power.attack(claim, "tf32", wrong))
    assert [cell.mutant for cell in cells if not cell.killed] == []
    assert len(cells) == len(wrong) > 0


def test_the_policy_is_not_run_and_never_held_without_cuda(tmp_path: Path) -> None:
    campaign = Campaign(
        Implementation("cpu"),
        [contract for contract in LOADED if contract.name == "cuda-forward-parity"],
        Options(effort="quick"),
        Selection(dtypes=["tf32"]),
        RealInput(CHECKPOINT, CORPUS_HELDOUT),
        tmp_path / "verdicts.jsonl",
    )
    targets = list(campaign.targets())
    assert len(targets) >= 3
    assert sorted(target.claim.id for target in targets) == sorted(claim.id for claim in IN_TF32 if claim.contract == "cuda-forward-parity")
    verdicts = [campaign.attack(target) for target in targets]
    assert {(verdict.state, verdict.reason) for verdict in verdicts} == {(State.NOT_RUN, "TF32 products exist on CUDA only")}
    assert falsify(CLAIMS["OP-LINEAR"], "tf32", Implementation("cpu"), Options()).state is State.NOT_RUN


def test_mutants_are_not_tried_in_a_policy_that_the_cpu_has_not() -> None:
    tasks = power.first_tasks([CLAIMS["OP-LINEAR"]], every=True)
    assert sorted(task.dtype for task in tasks) == ["bfloat16", "float32"]


def test_a_run_on_cuda_turns_tf32_on_for_the_policy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[bool] = []
    monkeypatch.setattr(implementation, "set_tf32", said.append)
    subject = Implementation("cpu")
    monkeypatch.setattr(subject, "_device", torch.device("cuda", 0))
    for dtype, inside in (("tf32", True), ("float32", False), ("bfloat16", False)):
        said.clear()
        with subject._products(dtype):
            assert said == [inside]
        assert said == [inside, False]
    said.clear()
    with pytest.raises(KeyError), subject._products("tf32"):
        raise KeyError
    assert said == [True, False]


def test_every_claim_of_the_policy_is_about_a_product() -> None:
    products = {"linear", "lora_linear", "nf4_linear", "attention"}
    assert [claim.id for claim in IN_TF32 if products.isdisjoint(power.reachable_operations(claim))] == []
