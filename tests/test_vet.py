"""`blackswan vet`: honest code holds, cheating code does not, and what is said of either can be used."""

import builtins
import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import blackswan
from blackswan.falsifiers.runner import vet
from blackswan.falsifiers.runner.campaign import Selection
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects import guards, isolated
from blackswan.falsifiers.subjects.functions import Functions
from blackswan.falsifiers.subjects.libraries import installed
from tests import cheating_subjects
from tests.cheating_subjects import honest

FILE = Path(cheating_subjects.__file__)
CHEATING = {
    name: function
    for name, function in vars(cheating_subjects).items()
    if inspect.isfunction(function) and not name.startswith("_") and name != "honest"
}
NEEDS_A_PROCESS = {
    "imports_the_answers": "the answers are there",
    "finds_the_answers": "'blackswan.reference'",
    "ends_its_process": "ended its process with status 0",
    "breaks_the_seal": "cannot be opened by a subject",
    "searches_memory": "StopIteration|^$",
    "reads_its_parents_memory": "cannot be opened by a subject",
    "raises_code": r"answered with an object of builtins\.exec; expected arrays and plain values",
    "sends_an_answer": "spoke when it was not asked",
}
"""Caught because they run where no answer is; the guards catch the others in any process."""
MANY_ROWS = 1031
QUESTION: tuple[Any, Any] = {"x": np.ones((1, 1)), "weight": np.ones(1)}, {"eps": 1e-6}
ONE = ("--operation", "rms_norm", "--claim", "OP-RMSNORM", "--dtype", "float32")


def _bad(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * weight + eps


def asked(subject: Any, claim: str = "OP-RMSNORM", **further: Any) -> vet.Result:
    """What one claim in float32 comes to in this process."""
    return blackswan.check(subject, claims=[claim], dtypes=["float32"], on_fail="return", **further)


def vetted(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = vet.main(arguments)
    said = capsys.readouterr()
    return status, said.out, said.err


@contextmanager
def in_its_process(name: str, operation: str | None = "rms_norm") -> Iterator[isolated.Isolated]:
    subject = isolated.Isolated(isolated.Named(name, operation))
    try:
        yield subject
    finally:
        subject.close()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a function may have left changed in this process is put back."""
    for place, name in (
        (torch, "allclose"),
        (time, "perf_counter"),
        (np.testing, "assert_allclose"),
        (np.random, "normal"),
        (builtins, "abs"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    torch.set_autocast_enabled("cpu", False)
    torch.set_flush_denormal(False)
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    if "allclose" in vars(torch.Tensor):
        del torch.Tensor.allclose


def test_honest_code_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert not blackswan.check(honest, operation="rms_norm", effort="quick").failures
    status, out, _ = vetted(capsys, f"{FILE}:honest", *ONE, "--json")
    assert status == 0
    assert [record["state"] for record in json.loads(out)] == ["HELD"]


def test_what_is_asked_on_request_is_asked_where_it_is_named() -> None:
    def asked(**chosen: Any) -> set[str]:
        campaign = vet.campaign_of(vet.as_subject(honest, "rms_norm"), Selection(**chosen), Options())
        return {target.dtype for target in campaign.targets()}

    assert asked() == {"float32", "bfloat16"}
    assert asked(dtypes=["float16"]) == asked(claims=["F16-RMSNORM"]) == {"float16"}


def test_what_is_asked_on_request_is_asked_of_an_operation_that_nothing_else_is_on() -> None:
    from blackswan.falsifiers.subjects.libraries.bitsandbytes import ADAMW_8BIT

    campaign = vet.campaign_of(Functions(ADAMW_8BIT, "8 bits"), Selection(), Options())
    assert {"OPT-ADAMW", "OPT-ADAMW-8BIT-STEP"} < {target.claim.id for target in campaign.targets()}


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


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", sorted(CHEATING.keys() - NEEDS_A_PROCESS))
def test_a_cheating_function_is_caught(name: str) -> None:
    result = asked(CHEATING[name], operation="rms_norm")
    assert [verdict.state for verdict in result.verdicts] == [State.FALSIFIED]


@pytest.mark.parametrize("operation", cheating_subjects.FEW_ROWS)
def test_a_function_that_is_right_for_few_rows_is_caught(operation: str) -> None:
    result = blackswan.check(cheating_subjects.FEW_ROWS, operation=operation, dtypes=["float32"], on_fail="return")
    ordinary = [verdict for verdict in result.failures if verdict.claim.kind in ("parity", "gradient")]
    assert {verdict.claim.kind for verdict in ordinary} == {"parity", "gradient"}
    assert all(max(verdict.case.sizes.values()) == MANY_ROWS for verdict in ordinary if verdict.case)


@pytest.mark.parametrize(("name", "said"), NEEDS_A_PROCESS.items())
def test_a_process_of_its_own_catches_the_others(name: str, said: str) -> None:
    with in_its_process(f"{FILE}:{name}") as subject, pytest.raises(Exception, match=said):
        subject.run("rms_norm", *QUESTION, "float32")
    assert "CAUGHT_BY" not in os.environ


def test_what_a_subject_prints_is_not_among_its_verdicts(capfd: pytest.CaptureFixture[str]) -> None:
    Path("prints.py").write_text("import torch\nprint('here')\n\ndef softmax(x):\n    print('there')\n    return torch.softmax(x, -1)\n")
    assert vet.main(["prints.py:softmax", "--claim", "OP-SOFTMAX", "--dtype", "float32", "--effort", "quick", "--json"]) == 0
    assert [record["state"] for record in json.loads(capfd.readouterr().out)] == ["HELD"]


def test_the_same_question_is_put_in_the_same_way_again() -> None:
    def layout(seed: int) -> list[Any]:
        found: list[Any] = []

        def compute(given: dict[str, Tensor]) -> dict[str, Tensor]:
            found.append((given["x"].storage_offset(), given["x"].stride()))
            return {"y": given["x"].clone()}

        asked_twice = guards.Guards()
        for value in (seed, 100 + seed, seed):
            asked_twice(compute, {"x": torch.full((3, 5), float(value))})
        return found

    every = [layout(seed) for seed in range(8)]
    assert all(found[:2] == found[4:] for found in every)
    assert len({found[0] for found in every}) > 3


@pytest.mark.parametrize(("library", "said"), [("liger", "Liger's kernels run on a GPU"), ("unsloth", "unsloth is not installed here")])
def test_what_runs_on_a_gpu_alone_is_not_run_elsewhere(capsys: pytest.CaptureFixture[str], library: str, said: str) -> None:
    if library == "unsloth" and installed("unsloth"):
        said = "Unsloth's kernels run on a GPU"
    status, out, _ = vetted(capsys, library, "--operation", "swiglu", "--claim", "OP-SWIGLU", "--json")
    assert status == vet.EXIT_NOTHING_HELD
    assert all(record["reason"].startswith(said) for record in json.loads(out))


def test_a_tolerance_that_was_measured_on_gpus_alone_is_not_held_against_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = vetted(
        capsys, "torch", "--claim", "KERNEL-LINEAR-GRADIENT", "--claim", "OP-LINEAR-GRADIENT", "--dtype", "float32", "--json"
    )
    found = {record["claim"]: record["state"] for record in json.loads(out)}
    assert found == {"KERNEL-LINEAR-GRADIENT": "NOT_RUN", "OP-LINEAR-GRADIENT": "HELD"}


def test_a_function_that_never_answers_is_falsified(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("hangs.py").write_text("import time\n\ndef rms_norm(x, weight, eps):\n    time.sleep(60)\n")
    with in_its_process("hangs.py:rms_norm") as subject:
        monkeypatch.setattr(isolated, "SECONDS", 0.5)
        with pytest.raises(isolated.SubjectError, match=r"gave no answer within 0\.5 s"):
            subject.run("rms_norm", *QUESTION, "float32")


BREAKS = """
import torch
broken = []

def rms_norm(x, weight, eps):
    broken.append(1)
    raise torch.AcceleratorError("CUDA error: misaligned address\\nFor debugging consider …")

def softmax(x):
    if broken:
        raise torch.AcceleratorError("CUDA error: misaligned address")
    return torch.softmax(x, -1)

OPERATIONS = {"rms_norm": rms_norm, "softmax": softmax}
"""


def test_after_an_error_of_cuda_the_next_question_is_asked_in_another_process() -> None:
    Path("breaks.py").write_text(BREAKS)
    with in_its_process("breaks.py:OPERATIONS", None) as subject:
        with pytest.raises(Exception, match=r"^CUDA error: misaligned address$"):
            subject.run("rms_norm", *QUESTION, "float32")
        assert subject.run("softmax", {"x": np.ones((1, 1))}, {}, "float32")["y"] == 1


def test_a_function_that_says_so_is_given_aligned_tensors_only(capsys: pytest.CaptureFixture[str]) -> None:
    Path("aligned.py").write_text("import torch\n\ndef softmax(x):\n    assert x.data_ptr() % 16 == 0\n    return torch.softmax(x, -1)\n")
    chosen = ("--claim", "OP-SOFTMAX", "--dtype", "float32", "--effort", "quick")
    status, out, _ = vetted(capsys, "aligned.py:softmax", *chosen)
    assert status == 1
    assert "blackswan vet aligned.py:softmax --replay" in out
    assert vetted(capsys, "aligned.py:softmax", "--aligned", *chosen)[0] == 0


def test_what_a_package_replaces_in_torch_when_it_is_imported_is_no_fault_of_its_user(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path("site-packages")
    package.mkdir()
    (package / "patching_package.py").write_text("import torch\nload = torch.load\ntorch.load = lambda *given: load(*given)\n")
    monkeypatch.syspath_prepend(str(package.resolve()))
    Path("mine.py").write_text("import torch\nimport patching_package\n\ndef softmax(x):\n    return torch.softmax(x, -1)\n")
    assert vetted(capsys, "mine.py:softmax", "--claim", "OP-SOFTMAX", "--dtype", "float32", "--effort", "quick")[0] == 0


def test_the_line_that_is_printed_replays_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("import torch\n" + inspect.getsource(_bad).replace("Tensor", "torch.Tensor"))
    status, out, _ = vetted(capsys, "mine.py:_bad", *ONE)
    assert status == 1
    assert "culprit    rms_norm" in out
    line = next(line.split(maxsplit=1)[1] for line in out.splitlines() if line.strip().startswith("replay "))
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("blackswan", "vet")
    again, replayed, _ = vetted(capsys, *arguments, "--json")
    assert again == 1
    assert [(record["claim"], record["state"], record["cases"]["run"]) for record in json.loads(replayed)] == [
        ("OP-RMSNORM", "FALSIFIED", 1)
    ]


def test_a_replay_of_mended_code_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError) as failed:
        blackswan.check(_bad, operation="rms_norm", claims=["OP-RMSNORM"], dtypes=["float32"])
    assert f"replay     blackswan vet {Path(__file__)}:_bad --operation rms_norm --replay" in str(failed.value)
    (case,) = Path("blackswan-reports/counterexamples").glob("OP-RMSNORM-*.npz")
    status, out, _ = vetted(capsys, f"{FILE}:honest", "--operation", "rms_norm", "--replay", str(case))
    assert (status, out.split()[0]) == (0, "HELD")


def test_two_processes_share_the_claims(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vet.options, "TARGETS_PER_PROCESS", 1)
    asked_of = (f"{FILE}:honest", "--operation", "rms_norm", "--claim", "OP-RMSNORM", "--effort", "quick")
    status, said, _ = vetted(capsys, *asked_of, "-n", "2", "--verdicts", str(tmp_path / "v.jsonl"))
    assert status == 0
    assert "2 HELD" in said


COMPILED = """
import torch

@torch.compile(backend="eager", fullgraph=True, dynamic=True)
def norm(x, weight, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
"""


def test_what_torch_compiles_is_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(COMPILED)
    status, said, _ = vetted(capsys, f"{file}:norm", *ONE, "--effort", "quick", "--verdicts", str(tmp_path / "v.jsonl"))
    assert status == 0, said


def test_status_5_where_nothing_held(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def rms_norm(x, weight):\n    return x\n")
    status, out, _ = vetted(capsys, "mine.py:rms_norm", *ONE)
    assert status == 5
    assert "takes no eps" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nofile.py:f",), "nofile.py: no such file"),
        (("mine.py:f", "--device", "xpu"), "mine.py:f: device 'xpu': this host has no usable xpu devices"),
        (("mine.py:g",), "mine.py:g: mine.py has no g; it has f"),
        (("no_module.here:f",), "no_module.here: no module of that name here"),
        (("mine",), "mine: expected FILE.py:NAME or package.module:NAME"),
        (("mine.py:f", "--operation", "rmsnorm"), "mine.py:f: unknown operation 'rmsnorm'"),
        (("mine.py:f", "--operation", "rms_norm"), "mine.py:f: f cannot be asked as rms_norm: it takes nothing"),
        (("broken.py:f", "--operation", "rms_norm"), "broken.py:f: RuntimeError: no GPU"),
    ],
)
def test_status_4_says_once_what_cannot_be_used(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated.Isolated, "_started", _started_here)
    Path("mine.py").write_text("def f():\n    pass\n")
    Path("broken.py").write_text("raise RuntimeError('no GPU')\n")
    status, _, err = vetted(capsys, *arguments)
    assert status == 4
    assert err.startswith(f"blackswan vet: {message}")


def _started_here(self: isolated.Isolated) -> None:
    """Loads the subject in this process: a process for each wrong name would take seconds."""
    try:
        isolated.subject_of(self.named.load(), self.named.name, self.named.operation)
    except ValueError as error:
        raise isolated._unusable(self.name, "unusable", str(error)) from None
    except Exception as error:
        raise isolated._unusable(self.name, "raised", isolated._described(error)) from None


class _Norm(torch.nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, hidden: Tensor) -> Tensor:
        return honest(hidden, self.weight, self.eps)


def _positional(hidden: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    return honest(hidden, scale, epsilon)


@pytest.mark.parametrize(
    ("subject", "operation"),
    [(_Norm(), "rms_norm"), ({"rms_norm": honest}, None), (_positional, "rms_norm"), (honest, "rms_norm")],
    ids=["module", "dict", "by position", "by name"],
)
def test_every_form_of_a_subject_is_asked(subject: Any, operation: str | None) -> None:
    for claim in ("OP-RMSNORM", "OP-RMSNORM-GRADIENT"):
        assert [verdict.state for verdict in asked(subject, claim, operation=operation).verdicts] == [State.HELD]


def test_an_operation_chooses_one_of_several() -> None:
    chosen = {"claims": ["OP-SOFTMAX", "OP-RMSNORM"], "dtypes": ["float32"], "effort": "quick", "on_fail": "return"}
    both = {"rms_norm": honest, "softmax": lambda x: torch.softmax(x, -1)}
    assert [one.claim.id for one in blackswan.check(both, operation="softmax", **chosen).verdicts] == ["OP-SOFTMAX"]
    with pytest.raises(ValueError, match="dict has no swiglu"):
        blackswan.check(both, operation="swiglu")
    with pytest.raises(ValueError, match=r"_Norm has no name of an operation; say which one it is by --operation"):
        blackswan.check(_Norm())


def test_the_story_of_an_answer_that_never_came_has_no_numbers() -> None:
    told = str(asked(cheating_subjects.writes_into_its_argument, operation="rms_norm"))
    assert "worst      (no answer)\n  difference raised Tampered: changed its argument x in place" in told


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


def test_an_axis_of_one_may_have_any_stride() -> None:
    one = torch.ones(1, 12).t()
    assert one.stride(-1) != 1
    assert guards._same(one, torch.ones(12, 1))
    assert not guards._same(one, torch.zeros(12, 1))
    assert guards._same(torch.tensor(1.0), torch.tensor(1.0))


def test_on_fail() -> None:
    assert asked(_bad, operation="rms_norm").failures
    with pytest.raises(AssertionError, match=r"(?s)FALSIFIED .*replay .*1 FALSIFIED"):
        blackswan.check(_bad, operation="rms_norm", claims=["OP-RMSNORM"], dtypes=["float32"])
    with pytest.raises(ValueError, match="expected raise or return"):
        blackswan.check(_bad, operation="rms_norm", on_fail="warn")


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


TUTORIAL = Path(__file__).resolve().parents[1] / "examples" / "vet"


def test_the_tutorial_finds_names_and_mends_its_bug() -> None:
    shutil.copytree(TUTORIAL, "tutorial")
    (Path("tutorial") / "contracts" / "mutants.json").unlink()
    found = {}
    for name, arguments in {
        "catalogue": ["catalogue"],
        "lint": ["contracts", "lint"],
        "fused": ["vet", "norms.py:fused", "--operation", "add_rms_norm", "--dtype", "float32", "-n", "1"],
        "mended": ["vet", "norms.py:mended", "--operation", "add_rms_norm", "--dtype", "float32", "-n", "1"],
        "power": ["power", "--claim", "FUSED-NORM", "--processes", "1"],
    }.items():
        command = [sys.executable, "-c", "from blackswan.cli import main; main()", *arguments, "--contracts", "contracts"]
        found[name] = subprocess.run(command, cwd="tutorial", capture_output=True, text=True, check=False)
    said = {name: run.stdout + run.stderr for name, run in found.items()}
    assert {name: run.returncode for name, run in found.items()} == {name: int(name == "fused") for name in found}, said
    assert (Path("tutorial") / "contracts" / "mutants.json").read_text() == (TUTORIAL / "contracts" / "mutants.json").read_text()
    assert "the answer equals the mutant add_rms_norm_eps_outside_root" in said["fused"]
    assert "--contracts contracts --replay" in said["fused"]
    assert "norms.py:mended: 2 HELD" in said["mended"]
    assert "3 of 4 mutants die here: FUSED-NORM" in said["power"] or "3 of 3 mutants die here: FUSED-NORM" in said["power"]


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLACKSWAN_CONTRACTS", "")
    status, _, err = vetted(capsys, "mine.py:f", "--contracts", "nowhere")
    assert status == 4
    assert "nowhere: no such folder" in err


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
