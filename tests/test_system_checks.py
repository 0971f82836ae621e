"""The checks of systems that lint knows: those of the code, each named by a claim, with its arguments and its choice of backends."""

import copy
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from blackswan import contracts
from blackswan.contracts import ContractError, Vocabulary, load
from blackswan.falsifiers import system
from blackswan.falsifiers.mutants import catalogue_command
from blackswan.falsifiers.numeric.comparison import Comparison, broken, rejected
from blackswan.falsifiers.system import catalogue
from blackswan.falsifiers.system.trial import up_to_the_worst

VOCABULARY = contracts.load_vocabulary()
PLAIN: dict[str, Any] = {
    "id": "OURS",
    "severity": "P1",
    "kind": "determinism",
    "check": "continued.killed_run_goes_on",
    "arguments": {"kills": 2},
    "statement": "A run that was killed goes on.",
    "must_catch": ["softmax_without_max_shift"],
}


@pytest.mark.parametrize(("path", "text"), catalogue_command.files().items(), ids=lambda value: getattr(value, "name", ""))
def test_the_catalogue_is_what_the_code_declares(path: Path, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run `python -m falsifiers catalogue`"


def test_each_check_of_a_system_is_named_by_a_claim() -> None:
    named = {claim.check for contract in load() for claim in contract.claims if claim.system}
    assert named == set(catalogue.checks())


def test_the_modules_that_ask_the_door_with_backends_are_those_that_are_said_to() -> None:
    modules = {found.name: import_module(f"{system.__name__}.{found.name}") for found in pkgutil.iter_modules(system.__path__)}
    assert {name for name, module in modules.items() if "trial.models" in inspect.getsource(module)} == set(catalogue.ON_BACKENDS)


def refused(folder: Path, claim: dict[str, Any], vocabulary: Vocabulary = VOCABULARY) -> list[tuple[str, str]]:
    path = folder / "ours-v1.yaml"
    path.write_text(yaml.safe_dump({"contract": "ours", "version": "1.0.0", "title": "Ours", "claims": [claim]}, sort_keys=False))
    try:
        load([path], vocabulary)
    except ContractError as error:
        lines = path.read_text().splitlines()
        for problem in error.problems:
            key = problem.key.rpartition(".")[2]
            assert f"{key}:" in lines[problem.line - 1], f"{problem} is not at its line"
        return [(problem.key.removeprefix("claims[0]."), problem.message) for problem in error.problems]
    return []


def test_a_claim_about_a_system_loads(tmp_path: Path) -> None:
    assert refused(tmp_path, PLAIN) == []
    whole = {**PLAIN, "check": "whole_models.follows_float64", "arguments": {"model": "qwen3-4b", "layers": 1}, "backend": "torch"}
    assert refused(tmp_path, whole) == []


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"check": "continued.killed_run_goes_one"}, "check", "did you mean 'continued.killed_run_goes_on'?"),
        ({"check": "continue.killed_run_goes_on"}, "check", "unknown check 'continue.killed_run_goes_on'; expected one of "),
        ({"check": "trial.check_of"}, "check", "unknown check 'trial.check_of'"),
        ({"check": "workloads.work"}, "check", "unknown check 'workloads.work'"),
        ({"arguments": {"kills": 2, "kill": 3}}, "arguments.kill", "unknown argument 'kill'; expected kills; did you mean 'kills'?"),
        ({"arguments": {}}, "check", "continued.killed_run_goes_on needs the argument 'kills'"),
        ({"backend": "torch"}, "backend", "continued.killed_run_goes_on has no choice of backends; expected none here"),
        ({"check": "whole_models.follows_float64", "arguments": {"layers": 1}}, "check", "needs the argument 'model'"),
    ],
)
def test_what_a_check_of_a_system_would_ignore_is_refused(tmp_path: Path, changes: dict[str, Any], key: str, message: str) -> None:
    ((found, said),) = refused(tmp_path, {**copy.deepcopy(PLAIN), **changes})
    assert found == key
    assert message in said


@pytest.mark.parametrize(
    ("claim", "arguments", "key", "message"),
    [
        ("LOSS-REJECTS-ONE-CLASS", {"bad": "one_class", "error": "ValueError"}, "check", "refuses needs the argument 'message'"),
        ("OP-RMSNORM", {"eps": 1e-5}, "arguments.eps", "is read by nothing: the claim has no check"),
    ],
)
def test_what_a_check_of_arrays_would_ignore_is_refused(tmp_path: Path, claim: str, arguments: Any, key: str, message: str) -> None:
    content = {each.id: each.content for contract in load() for each in contract.claims}
    claim = claim if claim in content else next(each for each, raw in content.items() if raw.get("check") == "refuses")
    raw = copy.deepcopy({name: value for name, value in content[claim].items() if name not in ("sources", "correction")})
    found = dict(refused(tmp_path, {**raw, "id": claim, "arguments": arguments}))
    assert message in found[key]
    assert refused(tmp_path, raw) == []


def test_each_check_of_arrays_reads_the_arguments_that_it_declares() -> None:
    from blackswan.falsifiers.numeric import checks

    source = "".join(inspect.getsource(import_module(f"{checks.__name__}.{found.name}")) for found in pkgutil.iter_modules(checks.__path__))
    declared = {name for check in contracts.load_checks().values() for name in (*check.arguments, *check.optional)}
    calls = re.findall(r"arguments(?:\[|\.get\()([^,\])]*)", source)
    assert {name.strip('"') for name in calls} == declared, "each by its name alone"


def test_a_check_ends_at_the_first_comparison_that_fails_beyond_measure_and_undoes_what_it_did() -> None:
    undone = []

    def check() -> Iterator[Comparison]:
        try:
            yield rejected("first")
            yield Comparison("by a little", False, 1.5, "max")
            yield broken("wholly", "other parts")
            yield rejected("last")
        finally:
            undone.append("all")

    assert [each.tensor for each in up_to_the_worst(check())] == ["first", "by a little", "wholly"]
    assert undone == ["all"]
    assert [each.tensor for each in up_to_the_worst([broken("one", ""), broken("another", "")])] == ["one"]
