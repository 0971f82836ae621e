"""`.ci/run` on a small repository, with stand-ins for the tools it calls."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TESTS = "pytest tests -n 2 --dist loadfile"
INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[test]' && pytest falsifiers"
README = f"# Sample\n\n```sh\n{INSTALL}\n```\n\nThen:\n\n```sh\n{TESTS}\n```\n"
STAND_IN = """#!/bin/bash
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
    "python3 -m venv .venv") mkdir -p .venv/bin; : > .venv/bin/activate ;;
    "pytest falsifiers") mkdir -p reports/generated; echo '{}' > reports/generated/verdicts.jsonl ;;
    "pytest tests "*) echo "===== 12 passed in 0.10s =====" ;;
esac
[[ $'\\n'$FAILING$'\\n' != *$'\\n'"$(basename "$0") $*"$'\\n'* ]]
"""


def ci(
    folder: Path, readme: str = README, failing: Sequence[str] = (), uncommitted: bool = False
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script; returns the outcome and the commands that it called."""
    repository, tools = folder / "repository", folder / "tools"
    (repository / ".ci").mkdir(parents=True)
    tools.mkdir()
    shutil.copy(ROOT / ".ci" / "run", repository / ".ci" / "run")
    (repository / "README.md").write_text(readme)
    git = ["git", "-C", str(repository), "-c", "user.name=ci", "-c", "user.email=ci@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "Sample"]):
        subprocess.run([*git, *arguments], check=True)
    if uncommitted:
        (repository / "README.md").write_text("changed")
    for name in ("python3", "python", "pip", "pytest", "ruff", "mypy"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(folder / "calls"), "FAILING": "\n".join(failing)}
    environment["TMPDIR"] = str(folder)
    outcome = subprocess.run([str(repository / ".ci" / "run")], env=environment, capture_output=True, text=True, timeout=60)
    calls = folder / "calls"
    return outcome, calls.read_text().splitlines() if calls.exists() else []


def test_commands_of_readme_are_run_in_order(tmp_path: Path) -> None:
    outcome, calls = ci(tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert calls == [
        "python3 --version",
        "python3 -m venv .venv",
        "pip install -e .[test]",
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "python -m contracts lint",
        "pytest falsifiers",
        "python -m reports render reports/generated/verdicts.jsonl",
        "python -m falsifiers power",
        TESTS,
    ]
    assert "12 passed" in outcome.stdout.splitlines()[-2]
    assert (tmp_path / "repository" / "reports" / "generated" / "verdicts.jsonl").exists()
    assert not list(tmp_path.glob("tmp.*"))


SECTIONS = {
    **{"lint": "ruff check .", "format": "ruff format --check .", "types": "mypy ", "contracts": "python -m contracts lint"},
    **{"falsifiers": "pytest falsifiers", "power": "python -m falsifiers power", "tests": TESTS},
}


@pytest.mark.parametrize("names", [[*SECTIONS], ["lint"], ["tests"]], ids="-".join)
def test_a_failure_fails_the_run_and_the_rest_still_runs(tmp_path: Path, names: list[str]) -> None:
    outcome, calls = ci(tmp_path, failing=[SECTIONS[name] for name in names])
    assert outcome.returncode == 1
    assert {*SECTIONS.values()} <= {*calls}
    assert outcome.stdout.splitlines()[-1] == f"ci: failed: {' '.join(names)}"


@pytest.mark.parametrize("failing", ["python3 -m venv .venv", "pip install -e .[test]"])
def test_failed_install_stops_the_run(tmp_path: Path, failing: str) -> None:
    outcome, calls = ci(tmp_path, failing=[failing])
    assert outcome.returncode != 0
    assert calls[-1] == failing


@pytest.mark.parametrize(
    "readme",
    [
        README.replace("```sh\n" + INSTALL + "\n```", INSTALL),
        README.replace("&& pytest falsifiers", "&& pytest falsifiers -q"),
        README.replace(TESTS, f"{TESTS} -q"),
        README + f"\n```sh\n{TESTS}\n```\n",
    ],
)
def test_readme_without_its_commands_is_an_error(tmp_path: Path, readme: str) -> None:
    assert readme != README
    outcome, calls = ci(tmp_path, readme=readme)
    assert outcome.returncode != 0
    assert "README.md must have exactly one fenced line" in outcome.stderr
    assert calls == ["python3 --version"]


def test_head_is_tested_not_the_working_tree(tmp_path: Path) -> None:
    outcome, _ = ci(tmp_path, uncommitted=True)
    assert outcome.returncode == 0
    assert "changes that are not committed" in outcome.stdout


def test_readme_of_this_repository_has_the_command() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert INSTALL in lines
    assert TESTS in lines


def test_workflow_calls_the_script() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["run"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
