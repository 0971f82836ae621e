"""`blackswan.check` and `blackswan.parametrize`: what they ask, return and raise."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import blackswan
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects.functions import Functions
from tests import cheating_subjects
from tests.cheating_subjects import honest
from tests.vetting import asked, wrong_norm

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.mark.parametrize("declared", [{}, {"intermediates": "storage"}])
def test_what_overflows_in_float16_is_falsified_whatever_is_declared(declared: dict[str, str]) -> None:
    def squares(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight

    def once(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return squares(x.float(), weight.float(), eps).to(x.dtype)

    for function, state in ((squares, State.FALSIFIED), (once, State.HELD)):
        subject = Functions({"rms_norm": function}, function.__name__, declared=declared)
        result = blackswan.check(subject, claims=["F16-RMSNORM"], dtypes=["float16"], on_fail="return")
        assert [verdict.state for verdict in result.verdicts] == [state]


class _Norm(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        return honest(hidden, self.weight, self.eps)


def _positional(hidden: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    return honest(hidden, scale, epsilon)


class _Kept(torch.nn.Module):
    """Epsilon is a buffer, as a checkpoint keeps it, and whatever wraps `forward` hides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("eps", torch.tensor(1e-6))

    def forward(self, *given: Tensor, **_: Any) -> Tensor:
        return honest(*given, self.weight, self.eps)  # type: ignore[arg-type]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[override]
        context.save_for_backward(x, weight)
        context.eps = eps
        return honest(x, weight, eps)

    @staticmethod
    def backward(context: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            x, weight = (value.detach().requires_grad_() for value in context.saved_tensors)
            return *torch.autograd.grad(honest(x, weight, context.eps), [x, weight], cotangent), None


def _by_place_only(x: Tensor, weight: Tensor, eps: float, /) -> Tensor:
    return honest(x, weight, eps)


def _first_and_others(x: Tensor, *others: Any) -> Tensor:
    return honest(x, *others)


class _Untold:
    """Its signature is no more known than that of a function written in C."""

    __signature__ = "unknown"

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return honest(x, weight, eps)


@pytest.mark.parametrize(
    ("subject", "operation"),
    [
        (_Norm(), "rms_norm"),
        (torch.compile(_Norm(), backend="eager", dynamic=True), "rms_norm"),
        (_Kept(), "rms_norm"),
        ({"rms_norm": honest}, None),
        (_positional, "rms_norm"),
        (honest, "rms_norm"),
        (_Fused.apply, "rms_norm"),
        (lambda **given: honest(**given), "rms_norm"),
        (_first_and_others, "rms_norm"),
        (_by_place_only, "rms_norm"),
        (_Untold(), "rms_norm"),
    ],
    ids=[
        "module",
        "compiled module",
        "buffer",
        "dict",
        "by position",
        "by name",
        "autograd's function",
        "keywords",
        "first and others",
        "positional only",
        "no signature",
    ],
)
def test_every_form_of_a_subject_is_asked(subject: Any, operation: str | None) -> None:
    for claim in ("OP-RMSNORM", "OP-RMSNORM-GRADIENT"):
        assert [verdict.state for verdict in asked(subject, claim, operation=operation).verdicts] == [State.HELD]


def test_a_module_is_asked_what_its_forward_has_places_for() -> None:
    for claim in ("OP-LINEAR", "OP-LINEAR-GRADIENT"):
        verdicts = asked(torch.nn.Linear(4, 4, bias=False), claim, operation="linear").verdicts
        assert [verdict.state for verdict in verdicts] == [State.HELD]


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="int cannot be asked as rms_norm: it cannot be called"):
        asked({"rms_norm": 3})


def test_an_operation_chooses_one_of_several() -> None:
    chosen = {"claims": ["OP-SOFTMAX", "OP-RMSNORM"], "dtypes": ["float32"], "effort": "quick", "on_fail": "return"}
    both = {"rms_norm": honest, "softmax": lambda x: torch.softmax(x, -1)}
    assert [one.claim.id for one in blackswan.check(both, operation="softmax", **chosen).verdicts] == ["OP-SOFTMAX"]
    with pytest.raises(ValueError, match="dict has no swiglu; it has rms_norm, softmax"):
        blackswan.check(both, operation="swiglu")
    with pytest.raises(ValueError, match=r"_Norm has no name of an operation; say which one it is by --operation"):
        blackswan.check(_Norm())


def test_the_story_of_an_answer_that_never_came_has_no_numbers() -> None:
    told = str(asked(cheating_subjects.writes_into_its_argument, operation="rms_norm"))
    assert "worst      (no answer)\n  difference changed its argument x in place" in told


def _without_eps(x: Tensor, weight: Tensor) -> Tensor:
    return honest(x, weight, 1e-6)


def _without_graph(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return honest(x, weight, eps).detach()


@pytest.mark.parametrize(
    ("function", "claim", "reason"),
    [(_without_eps, "OP-RMSNORM", "takes no eps"), (_without_graph, "OP-RMSNORM-GRADIENT", "has no backward pass of rms_norm")],
)
def test_what_a_subject_lacks_is_not_run_with_the_reason(function: Callable[..., Tensor], claim: str, reason: str) -> None:
    (verdict,) = asked(function, claim, operation="rms_norm").verdicts
    assert verdict.state is State.NOT_RUN
    assert reason in str(verdict.reason)


def test_a_gradient_that_only_some_cases_have_is_falsified() -> None:
    def function(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return honest(x, weight, eps) if x.shape[-1] > 4 else honest(x, weight, eps).detach()

    (verdict,) = asked(function, "OP-RMSNORM-GRADIENT", operation="rms_norm").verdicts
    assert verdict.state is State.FALSIFIED
    assert "requires a gradient in some cases, and in others not" in str(verdict.comparison)


def test_the_line_of_a_mapping_of_one_function_replays_it() -> None:
    with pytest.raises(AssertionError, match=r"replay     blackswan vet \S+vetting.py:wrong_norm --operation rms_norm --replay"):
        blackswan.check({"rms_norm": wrong_norm}, claims=["OP-RMSNORM"], dtypes=["float32"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("answers_with_a_sparse_tensor", "y is a sparse_coo tensor; expected a dense one"),
        ("answers_on_no_device", "y is a meta tensor; expected a dense one"),
        ("changes_the_environment", "changed the environment: others at CUDA_LAUNCH_BLOCKING"),
        ("changes_the_environment_beside_an_import", "changed the environment: others at CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_what_is_wrong_beside_the_numbers_is_said(name: str, said: str) -> None:
    assert said in str(asked(getattr(cheating_subjects, name), operation="rms_norm"))


def test_complex_numbers_are_no_answer() -> None:
    def function(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return honest(x, weight, eps).to(torch.complex64)

    assert "expected float32, got complex64" in str(asked(function, operation="rms_norm"))


def test_on_fail() -> None:
    assert asked(wrong_norm, operation="rms_norm").failures
    with pytest.raises(AssertionError, match=r"(?s)FALSIFIED .*replay .*1 FALSIFIED"):
        blackswan.check(wrong_norm, operation="rms_norm", claims=["OP-RMSNORM"], dtypes=["float32"])
    with pytest.raises(ValueError, match="expected raise or return"):
        blackswan.check(wrong_norm, operation="rms_norm", on_fail="warn")


USERS_TESTS = """
import blackswan, torch

def softmax(x, power=1.0):
    return torch.softmax(x.float(), -1).pow(power).to(x.dtype)

@blackswan.parametrize({"softmax": lambda x: softmax(x, 0.9)}, effort="quick", expected={
    "OP-SOFTMAX": "issue 12", "OP-SOFTMAX-GRADIENT": "issue 12", "OP-SOFTMAX-SIMPLEX": "issue 12",
    "PREC-SOFTMAX": "issue 12"})
def test_known(claim):
    claim()

@blackswan.parametrize({"softmax": softmax}, effort="quick", expected={"OP-SOFTMAX-GRADIENT": "mended long ago"})
def test_stale(claim):
    claim()
"""


def test_parametrize_in_the_tests_of_a_user() -> None:
    Path("test_mine.py").write_text(USERS_TESTS)
    command = [sys.executable, "-m", "pytest", "test_mine.py", "-n", "1", "-W", "error", "-rA", "-q", "-p", "no:cacheprovider"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = run.stdout.splitlines()
    assert run.returncode == 1, run.stdout + run.stderr
    assert any(line.startswith("PASSED test_mine.py::test_stale[OP-SOFTMAX-float32]") for line in lines)
    known = [line for line in lines if line.startswith("XFAIL test_mine.py::test_known[OP-SOFTMAX-float32]")]
    assert known
    assert "issue 12" in known[0]
    failed = {line.partition(" - ")[0] for line in lines if line.startswith("FAILED")}
    stale = {f"FAILED test_mine.py::test_stale[OP-SOFTMAX-GRADIENT-{dtype}]" for dtype in ("float32", "bfloat16")}
    assert failed == stale
    assert "mended long ago" in run.stdout


def test_a_claim_in_expected_must_be_asked() -> None:
    with pytest.raises(ValueError, match=r"expected: OP-SOFTMAX is not asked of dict; it is asked .*OP-RMSNORM"):
        blackswan.parametrize({"rms_norm": honest}, expected={"OP-SOFTMAX": "issue 12"})
