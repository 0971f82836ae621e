"""Settings of Python and Hypothesis around a run: they change no verdict, or the run is refused in a line."""

import subprocess
import sys
from pathlib import Path

from terminal_processes import ENVIRONMENT, ROOT, Run, several


def run(*line: object, **environment: str) -> Run:
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, line), "-n", "0", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT, env={**ENVIRONMENT, **environment}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return Run(ran.returncode, ran.stdout + ran.stderr)


def test_a_run_without_assert_statements_gives_the_same_verdicts(tmp_path: Path) -> None:
    chosen = ("--claim", "OP-SOFTMAX", "--dtype", "float32", "--effort", "quick", "--verdicts")
    (plain,) = several([[*chosen, str(tmp_path / "plain.jsonl")]])
    bare = run("falsifiers", *chosen, tmp_path / "bare.jsonl", PYTHONOPTIMIZE="2")  # which leaves docstrings out too
    assert (plain.status, bare.status) == (0, 0), bare.text
    one, other = plain.verdict(tmp_path / "plain.jsonl"), bare.verdict(tmp_path / "bare.jsonl")
    keys = ("state", "cases", "headroom", "worst_case")
    assert [one[key] for key in keys] == [other[key] for key in keys]


def test_what_is_refused_without_assert_statements_is_refused_in_a_line(tmp_path: Path) -> None:
    """A file that is no case of its claim, and the tests themselves, are refused in a line."""
    refused = run("falsifiers", "--replay", tmp_path / "none.npz", PYTHONOPTIMIZE="1")
    refused.refuses(4)
    tests = run("tests/test_contracts_sizes.py", PYTHONOPTIMIZE="1")
    assert (tests.status, "the tests need assert statements" in tests.text, "Traceback" in tests.text) == (4, True, False), tests.text


def test_a_profile_that_hypothesis_does_not_have_is_one_line_and_status_4(tmp_path: Path) -> None:
    lines = [
        ["--hypothesis-profile", name, "--claim", "C-HP-001-RANGE", "--verdicts", str(tmp_path / f"{name}.jsonl")]
        for name in ("nope", "ci")
    ]
    unknown, known = several(lines)
    assert unknown.status == 4, unknown.text
    assert unknown.text.splitlines() == [
        "ERROR: --hypothesis-profile: unknown profile 'nope'; expected default, ci, or one that a conftest registers",
        "",
    ]
    assert not (tmp_path / "nope.jsonl").exists()
    assert known.status == 0, known.text
