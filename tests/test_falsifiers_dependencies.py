"""What a verdict is said to depend on holds every file of the project whose functions ran for it, and of the others no more than a few."""

import ast
import functools
import json
import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import contracts
import impl.operations
from contracts.model import Claim
from falsifiers import dependencies
from falsifiers.__main__ import main
from falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from falsifiers.dependencies import ROOT, entries
from falsifiers.engine import Options, falsify
from falsifiers.kinds import KINDS
from falsifiers.real_input import RealInput
from falsifiers.subjects.implementation import Implementation
from falsifiers.subjects.procedures.workers import WORKERS
from impl.operations import OPERATIONS
from reports.dependencies import PARTS, Sources

CLAIMS = [claim for contract in contracts.load() for claim in contract.claims]
FOLDERS = tuple(f"{ROOT / folder}/" for folder in ("contracts", "reference", "impl", "falsifiers"))
HARNESS = {
    # Whether something can run at all, how a process ends, and who hands on what is asked; what the loader makes of YAML is in the
    # claim's own digest.
    ("falsifiers/subjects/procedures/footprint.py", "why_not"),
    ("impl/fused/step.py", "why_not"),
    ("impl/ending.py", "interrupts_first"),
    ("falsifiers/subjects/procedures/__init__.py", None),
    ("contracts/loader.py", None),
    ("contracts/vocabulary.py", None),
}


@pytest.fixture
def not_interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each of an interpreted kernel's lines would be traced. The process that forks workers keeps the environment it started with."""
    WORKERS.close()
    with monkeypatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield
        WORKERS.close()


@contextmanager
def traced() -> Iterator[dict[str, set[str]]]:
    """The files of the project whose functions run in the block, and which."""
    found: defaultdict[str, set[str]] = defaultdict(set)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(FOLDERS):
            found[Path(code.co_filename).relative_to(ROOT).as_posix()].add(code.co_name)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def said(claim: Claim, sources: Sources) -> set[str]:
    return {file for part, files in entries(claim).items() for file in sources.closure(part, files)}


def unsaid(ran: dict[str, set[str]], claim: Claim, sources: Sources) -> list[str]:
    """What ran and is neither said nor the harness's."""
    known = said(claim, sources)
    functions = [(file, name) for file, names in ran.items() if file not in known for name in names]
    return sorted(f"{file}: {name}" for file, name in functions if not {(file, name), (file, None)} & HARNESS)


@pytest.mark.parametrize("contract", sorted({claim.contract for claim in CLAIMS}))
@pytest.mark.usefixtures("not_interpreted")
def test_what_runs_for_a_claim_is_what_its_verdict_depends_on(contract: str) -> None:
    sources, subject, shipped = Sources(ROOT), Implementation("cpu"), RealInput(CHECKPOINT, CORPUS_HELDOUT)
    missing = {}
    # Of those that say the same, one.
    claims = {str(entries(claim)): claim for claim in CLAIMS if claim.contract == contract}
    for claim in claims.values():
        case = shipped.case if claim.domain.input == "checkpoint" else None
        with traced() as ran:
            falsify(claim, claim.domain.dtype[0], subject, Options("quick", 0, examples=1), case)
        assert ran, claim.id
        missing[claim.id] = unsaid(ran, claim, sources)
    assert {name: files for name, files in missing.items() if files} == {}


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("OP-RMSNORM", "reference/run.py"),
        ("OP-RMSNORM", "impl/dispatch.py"),
        ("OP-RMSNORM", "contracts/sizes.py"),
        ("C-HP-001-RANGE", "contracts/rules.py"),
        ("FWD-CHECKPOINT", "falsifiers/data/checkpoint/model.safetensors"),
        ("DATA-STATISTICS", "falsifiers/data/corpus/heldout.jsonl"),
        ("DATA-STATISTICS", "falsifiers/data/__init__.py"),
        ("CKPT-MERGE-SUM", "falsifiers/data/checkpoint/model.safetensors"),
        ("DP-SAME-WEIGHTS", "falsifiers/subjects/procedures/forking.py"),
        ("TRN-KILLED-AND-CONTINUED", "falsifiers/subjects/procedures/forking.py"),
        ("DEV-LOAD-NF4", "falsifiers/subjects/procedures/allocator.py"),
        ("TRN-RUN-STEPS", "reference/attention.py"),
        ("TRN-RUN-STEPS", "impl/operations/attention.py"),
        ("WHOLE-TRITON", "impl/kernels/rms_norm.py"),
        ("WHOLE-FUSED", "impl/fused/layer.py"),
        ("DP-TRAJECTORY", "impl/operations/optimisation.py"),
    ],
)
def test_a_change_makes_the_verdicts_stale_that_ran_it(name: str, file: str) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.id == name)
    assert file in said(claim, Sources(ROOT))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("OP-RMSNORM", "reference/attention.py"),
        ("OP-RMSNORM", "impl/operations/attention.py"),
        ("OP-RMSNORM", "impl/trainer.py"),
        ("DATA-SPLIT", "reference/attention.py"),
        ("CLS-GRADIENT", "falsifiers/data/corpus/heldout.jsonl"),
    ],
)
def test_a_change_elsewhere_makes_no_verdict_stale(name: str, file: str) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.id == name)
    assert file not in said(claim, Sources(ROOT))


def test_every_part_is_said_of_every_claim() -> None:
    for claim in CLAIMS:
        assert set(entries(claim)) == set(PARTS)


def another(**_: Any) -> None:
    """An operation that is not the table's."""


def test_a_table_that_gives_another_function_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.id == "OP-RMSNORM")
    before = entries(claim)
    for other in (OPERATIONS["swiglu"], another):  # of the same file, and of another
        monkeypatch.setitem(OPERATIONS, "rms_norm", other)
        assert entries(claim)["subject"] != before["subject"]
    monkeypatch.undo()
    assert claim.check is None
    monkeypatch.setitem(KINDS, claim.kind, another)
    assert entries(claim)["comparison"] != before["comparison"]
    assert entries(claim)["subject"] == before["subject"]


WRAPPED = """
import functools

def scaled(function):
    @functools.wraps(function)
    def run(**arguments):
        return 1.5 * function(**arguments)
    return run

class Scaled:
    def __init__(self, function):
        functools.update_wrapper(self, function)

    def __call__(self, **arguments):
        return 1.5 * self.__wrapped__(**arguments)
"""


@pytest.mark.parametrize(
    ("wrapper", "places"),
    [
        (lambda made, function: made["scaled"](function), ["scaled.<locals>.run"]),
        (lambda made, function: made["Scaled"](function), ["Scaled"]),
        (lambda made, function: functools.cache(made["Scaled"](made["scaled"](function))), ["Scaled", "scaled.<locals>.run"]),
        (lambda _, function: functools.cache(function), []),
    ],
)
def test_what_wraps_a_function_of_a_table_is_seen(wrapper: Any, places: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.id == "OP-RMSNORM")
    before = entries(claim)
    made: dict[str, Any] = {"__name__": impl.operations.__name__}
    exec(compile(WRAPPED, impl.operations.__file__, "exec"), made)  # as if it stood in that file
    monkeypatch.setitem(OPERATIONS, "rms_norm", wrapper(made, OPERATIONS["rms_norm"]))
    added = [f"impl/operations/__init__.py::{place}" for place in places]
    assert entries(claim) == {**before, "subject": sorted([*before["subject"], *added])}


def test_the_command_says_what_every_claim_depends_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["depends"]) == 0
    assert json.loads(capsys.readouterr().out) == {claim.id: entries(claim) for claim in CLAIMS}


def test_a_file_that_a_system_leaves_beside_the_data_makes_nothing_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.id == "DATA-STATISTICS")
    before = entries(claim)
    shutil.copytree(ROOT / "falsifiers" / "data", tmp_path / "falsifiers" / "data")
    data = tmp_path / "falsifiers" / "data"
    (data / "corpus" / ".DS_Store").write_bytes(b"\0")
    monkeypatch.setattr(dependencies, "CHECKPOINT", data / "checkpoint")
    monkeypatch.setattr(dependencies, "CORPUS_HELDOUT", data / "corpus" / "heldout.jsonl")
    monkeypatch.setattr(dependencies, "ROOT", tmp_path)
    own = [name for name in before["comparison"] if name.startswith("falsifiers/data/")]
    assert "falsifiers/data/corpus/heldout.jsonl" in own
    assert sorted(dependencies._input(claim, [name for name in before["comparison"] if name.startswith("falsifiers/checks/")])) == own


def does_more_than_list(source: str) -> list[str]:
    """What stands in a table of contents besides imports, docstrings and tables of names."""
    return [ast.unparse(node) for node in ast.parse(source).body if not lists(node)]


def lists(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        called = {ast.unparse(part.func) for part in ast.walk(node) if isinstance(part, ast.Call)}
        return all(isinstance(target, ast.Name) for target in targets) and called <= {"_vocabulary", "Command", "dict.fromkeys"}
    return isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def test_what_no_digest_counts_is_a_table_of_contents() -> None:
    sources = Sources(ROOT)
    counted = {file for claim in CLAIMS for file in said(claim, sources)}
    packages = [path for folder in ("impl", "reference", "falsifiers", "contracts") for path in (ROOT / folder).rglob("__init__.py")]
    left = [path for path in packages if path.relative_to(ROOT).as_posix() not in counted and path.parent.name != "mutants"]
    assert ROOT / "impl" / "operations" / "__init__.py" in left
    assert {path.as_posix(): more for path in left if (more := does_more_than_list(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "line", ["torch.backends.cuda.matmul.allow_tf32 = True", "F.silu = F.relu", "TABLE = {'f': twice(f)}", "if X:\n    import y"]
)
def test_a_table_of_contents_that_does_something_is_found(line: str) -> None:
    assert does_more_than_list(f'"""Doc."""\nfrom a import b\n{line}\n') == [ast.unparse(ast.parse(line))]
    assert does_more_than_list("T = {f.__name__: f for f in (a.b, c)}\nU: dict[str, int] = {'a': a.b}\n__all__ = ['a']\n") == []
