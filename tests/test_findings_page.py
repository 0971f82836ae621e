"""FINDINGS.md against what was found of the subjects that ship: nothing is falsified without a reproduction, and nothing is left out."""

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from blackswan.falsifiers.subjects.libraries import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
FINDINGS = ROOT / "examples" / "findings"
PAGE = (ROOT / "FINDINGS.md").read_text(encoding="utf-8")
LONGEST = 14
"""Lines of a reproduction below its docstring."""


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page", FINDINGS / "page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


page = _loaded()
KEPT = json.loads(page.HELD.read_text(encoding="utf-8"))
FOUND: dict[str, Any] = KEPT["subjects"]
SCRIPTS = [finding.script for finding in page.FINDINGS.values()]


def test_every_subject_was_asked() -> None:
    assert {re.split("[: ]", name)[0] for name in page.SUBJECTS} == set(PACKAGES)
    assert FOUND.keys() == page.SUBJECTS.keys()
    assert all(each["states"] for each in FOUND.values())


def test_whatever_is_falsified_has_a_reproduction() -> None:
    assert page.not_analysed(FOUND) == []
    assert "not analysed" not in PAGE
    assert all(finding.title and finding.where for finding in page.FINDINGS.values())


def test_nothing_is_explained_that_is_not_falsified() -> None:
    falsified = {(name, failure["claim"]) for name, each in FOUND.items() for failure in each["falsified"]}
    explained = {pair for finding in page.FINDINGS.values() for pair in finding.explains}
    assert explained - falsified <= page.FINDINGS["torch_compiled_transposed"].explains  # the layouts of a run decide on those


def test_the_finding_of_another_subject_explains_nothing() -> None:
    refused = {"claim": "LOSS-CE-REFUSES-NAN", "dtype": "float32", "state": "FALSIFIED", "what": "", "replay": ""}
    found = {**FOUND, "peft": {**FOUND["peft"], "falsified": [refused]}}
    assert page.explaining("torch", "LOSS-CE-REFUSES-NAN") == ["torch_no_refusal"]
    assert page.not_analysed(found) == [("peft", "LOSS-CE-REFUSES-NAN")]
    assert any("| LOSS-CE-REFUSES-NAN in float32 |" in line and "| not analysed |" in line for line in page.falsified(found))


def test_the_page_says_what_was_found_and_where() -> None:
    assert "\n".join(page.head(FOUND)) in PAGE
    assert all(KEPT["reproductions"][script.stem] for script in SCRIPTS)
    assert "\n".join(page.reproductions(KEPT["reproductions"])) in PAGE
    assert "\n".join(page.table(FOUND)) in PAGE
    assert "\n".join(page.falsified(FOUND)) in PAGE
    for script in SCRIPTS:
        assert f"### [{script.stem}](examples/findings/{script.name})" in PAGE


def test_each_has_a_case_to_replay() -> None:
    for each in FOUND.values():
        assert all((FINDINGS / failure["replay"]).is_file() for failure in each["falsified"])
    kept = {failure["replay"] for each in FOUND.values() for failure in each["falsified"]}
    assert kept == {path.relative_to(FINDINGS).as_posix() for path in page.REPLAYS.rglob("*") if path.is_file()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_reproductions_are_short_and_without_blackswan(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    docstring, *_ = ast.parse(text).body
    assert docstring.end_lineno is not None
    assert len(text.splitlines()) - docstring.end_lineno <= LONGEST
    assert "blackswan" not in text
