"""Installed from a wheel, in somebody else's repository: one import name, and every door works beside packages of the same names."""

import shlex
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from terminal_processes import ENVIRONMENT, ROOT, records

SHIPPED = (
    "contracts/mutants.json",
    "contracts/system_checks.json",
    "contracts/contract.schema.json",
    "contracts/decoder-operations-v1.yaml",
    "falsifiers/data/README.md",
    "falsifiers/data/checkpoint/model.safetensors",
    "falsifiers/data/corpus/heldout.jsonl",
    "falsifiers/runner/known-failures.yaml",
    "reports/page.css",
    "reports/verdict.schema.json",
)


class Installed(NamedTuple):
    """What the wheel holds, the folder that it is installed into, and somebody's repository."""

    names: list[str]
    packages: Path
    repository: Path

    def run(self, *line: str) -> "subprocess.CompletedProcess[str]":
        """A command line in the repository; its first word is a script of the wheel, pytest or python."""
        program, *rest = line
        words = {"pytest": [sys.executable, "-m", "pytest"], "python": [sys.executable]}
        command = words.get(program, [sys.executable, str(self.packages / "bin" / program)])
        return subprocess.run([*command, *rest], cwd=self.repository, env=self._environment(), capture_output=True, text=True, timeout=300)

    def _environment(self) -> Mapping[str, str]:
        return {**{name: value for name, value in ENVIRONMENT.items() if name != "PYTEST_ADDOPTS"}, "PYTHONPATH": str(self.packages)}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """A wheel of what git tracks, installed into a folder of its own."""
    folder = tmp_path_factory.mktemp("installed")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in filter(None, tracked):
        source, copy = ROOT / name, folder / "source" / name
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(source.readlink()) if source.is_symlink() else copy.write_bytes(source.read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run([*pip, *build], check=True, capture_output=True, text=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    packages, repository = folder / "packages", folder / "repository"
    install = ["install", "--no-deps", "--no-index", "--target", str(packages), str(wheel)]
    subprocess.run([*pip, *install], check=True, capture_output=True, text=True, timeout=300)
    for name in ("reports", "contracts", "tests"):
        (repository / name).mkdir(parents=True)
        (repository / name / "__init__.py").write_text("raise ImportError('this is the package of the repository')\n")
    (repository / "test_own.py").write_text("def test_own(request):\n    assert not hasattr(request.config.option, 'effort')\n")
    (repository / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    return Installed(zipfile.ZipFile(wheel).namelist(), packages, repository)


def test_the_wheel_holds_one_package_with_its_data(installed: Installed) -> None:
    assert {name.split("/")[0] for name in installed.names if ".dist-info/" not in name} == {"blackswan"}
    assert {f"blackswan/{name}" for name in SHIPPED} <= {*installed.names}


def test_claims_are_attacked_and_verdicts_land_in_the_working_directory(installed: Installed) -> None:
    line = ("pytest", "--pyargs", "blackswan.falsifiers", "--claim", "OP-SOFTMAX", "-p", "no:cacheprovider")
    ran = installed.run(*line)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = records(installed.repository / "blackswan-reports" / "verdicts.jsonl")
    assert {record["claim"] for record in found if record["record"] == "verdict"} == {"OP-SOFTMAX"}
    assert "report: blackswan-reports/verdicts.md" in ran.stdout
    assert "<style>" in (installed.repository / "blackswan-reports" / "verdicts.html").read_text()
    assert not (installed.packages / "blackswan" / "reports" / "generated").exists()


def test_a_falsified_claim_is_replayed_by_its_line(installed: Installed) -> None:
    operations = installed.packages / "blackswan" / "impl" / "operations" / "__init__.py"
    right = operations.read_text()
    try:
        operations.write_text(right + "\nOPERATIONS['residual_add'] = lambda x, branch: branch * 1.0\n")
        ran = installed.run("blackswan", "falsify", "--claim", "OP-RESIDUAL", "--dtype", "float32")
        assert ran.returncode == 1, ran.stdout + ran.stderr
        assert "report: blackswan-reports/verdicts.md" in ran.stdout
        (replay,) = [
            record["counterexample"]["replay"]
            for record in records(installed.repository / "blackswan-reports" / "verdicts.jsonl")
            if record["record"] == "verdict"
        ]
        assert replay.startswith("blackswan falsify --replay blackswan-reports/counterexamples/OP-RESIDUAL-float32-")
    finally:
        operations.write_text(right)
    again = installed.run(*shlex.split(replay))
    assert again.returncode == 0, again.stdout
    assert len(records(installed.repository / "blackswan-reports" / "replay.jsonl")) == 3


def test_the_other_doors_work(installed: Installed) -> None:
    for line, words in (
        (("python", "-m", "blackswan.contracts", "lint"), "no problems"),
        (("blackswan", "contracts", "lint"), "no problems"),
        (("blackswan", "power", "--claim", "OP-RESIDUAL", "--processes", "1"), "catches what it must and can fail"),
        (("blackswan", "report", "render", "blackswan-reports/verdicts.jsonl"), "blackswan-reports/verdicts.html"),
        (("blackswan", "--version"), "0.1.0"),
    ):
        ran = installed.run(*line)
        assert ran.returncode == 0, f"{line}: {ran.stdout}{ran.stderr}"
        assert words in ran.stdout, f"{line}: {ran.stdout}"


def test_pytest_without_the_falsifiers_keeps_its_own_options(installed: Installed) -> None:
    (installed.repository / "conftest.py").write_text("def pytest_addoption(parser):\n    parser.addoption('--model', default='own')\n")
    try:
        ran = installed.run("pytest", "-q", "-p", "no:cacheprovider", "--model", "theirs", "test_own.py")
    finally:
        (installed.repository / "conftest.py").unlink()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout


def test_no_text_recommends_a_strangers_package() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True, text=True).stdout.splitlines()
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in tracked
        if name.endswith((".py", ".md", ".toml", ".yml")) and (ROOT / name).is_file()
    }
    wrong = "pip install " + "blackswan"
    found = [
        name
        for name, text in texts.items()
        if name != "tests/test_installed.py"
        for line in text.replace("'", "").replace('"', "").splitlines()
        if wrong in line and f"{wrong}-contracts" not in line
    ]
    assert found == []
