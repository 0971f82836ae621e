"""The process and the guards around somebody else's code: cheating is caught, and honest code is left alone."""

import builtins
import inspect
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import blackswan
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects import guards, isolated, serving
from blackswan.falsifiers.subjects.named import Named
from tests import cheating_subjects
from tests.vetting import FILE, asked, vetted

pytestmark = pytest.mark.usefixtures("own_folder")


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
    "asks_another_python": "the answers are there",
    "asks_a_python_that_knows_nothing": "the answers are there",
    "searches_memory": "StopIteration|^$",
    "reads_its_parents_memory": "cannot be opened by a subject",
    "raises_code": r"answered with an object of builtins\.exec; expected arrays and plain values",
    "sends_an_answer": "spoke when it was not asked",
}
"""Caught because they run where no answer is; the guards catch the others in any process."""
MANY_ROWS = 1031
QUESTION: tuple[Any, Any] = {"x": np.ones((1, 1)), "weight": np.ones(1)}, {"eps": 1e-6}


@contextmanager
def in_its_process(name: str, operation: str | None = "rms_norm") -> Iterator[isolated.Isolated]:
    subject = isolated.Isolated(Named(name, operation))
    try:
        yield subject
    finally:
        subject.close()


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a function may have left changed in this process is put back."""
    for place, name in (
        (torch, "allclose"),
        (time, "perf_counter"),
        (np.testing, "assert_allclose"),
        (np.random, "normal"),
        (builtins, "abs"),
        (torch.cuda.Event, "elapsed_time"),
        (torch.autograd, "grad"),
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


def test_a_question_lies_in_memory_as_it_did() -> None:
    """Also where a later tensor has other values: else a relation that holds bit for bit would be false for another order of sums."""

    def layout(seed: int) -> list[Any]:
        found: list[Any] = []

        def compute(given: dict[str, Tensor]) -> dict[str, Tensor]:
            found.append((given["x"].storage_offset(), given["x"].stride()))
            return {"y": given["x"].clone()}

        asked_twice = guards.Guards()
        for value in (seed, 100 + seed, seed):
            asked_twice(compute, {"x": torch.full((3, 5), float(seed)), "weight": torch.full((5,), float(value))})
        return found

    every = [layout(seed) for seed in range(8)]
    assert all(found[:2] == found[2:4] == found[4:] for found in every)
    assert len({found[0] for found in every}) > 3


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


def test_an_axis_of_one_may_have_any_stride() -> None:
    one = torch.ones(1, 12).t()
    assert one.stride(-1) != 1
    assert guards._same(one, torch.ones(12, 1))
    assert not guards._same(one, torch.zeros(12, 1))
    assert guards._same(torch.tensor(1.0), torch.tensor(1.0))


def test_what_a_device_needs_set_is_not_held_against_a_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    def require(_: str) -> None:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    monkeypatch.setattr(serving, "require_device", require)
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=serving.serve, args=(its, Named(f"{FILE}:honest", "rms_norm")), daemon=True
    )
    process.start()
    assert ours.recv() == (0, "answer", None)
    ours.send((1, "run", ("rms_norm", *QUESTION, "float32")))
    assert ours.recv()[1] == "answer"
    process.kill()
