"""What a false claim about runs says: the settings that were asked, and whose wrong version fails at the same place."""

import json
from pathlib import Path

import pytest
from falsifiers_claims import CLAIMS

from blackswan.falsifiers.diagnosis import run_failures
from blackswan.falsifiers.diagnosis.run_failures import place, recorded
from blackswan.falsifiers.mutants.registry import applied
from blackswan.falsifiers.runner.engine import Options, falsify
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects.implementation import Implementation
from blackswan.falsifiers.system.questions import question


def test_places_have_no_numbers_and_no_parameters() -> None:
    assert place("process 2, step 31, state, exp_avg/model.norm.weight") == "process #, step #, state, exp_avg"
    assert place("frozen, model.layers.1.self_attn.q_proj.weight") == "frozen"


def test_a_place_with_a_name_that_utf8_does_not_hold_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_failures, "RECORD", tmp_path / "failures.json")
    run_failures.record([("A-CLAIM", "a_mutant", "files of mod\udce9le.apr")])
    assert json.loads((tmp_path / "failures.json").read_bytes()) == {"A-CLAIM": {"a_mutant": "files of mod\udce9le.apr"}}


def test_the_record_is_of_the_claims_and_mutants_that_there_are() -> None:
    for claim, failures in recorded().items():
        assert set(failures) <= set(CLAIMS[claim].must_catch), f"{claim}: python -m falsifiers power --record-failures"
    assert {name for name, claim in CLAIMS.items() if claim.system and claim.domain.device != ("cuda",)} <= set(recorded())


def test_a_false_claim_about_runs_says_what_was_asked() -> None:
    with applied("order_same_in_each_epoch"):
        verdict = falsify(CLAIMS["DATA-EPOCH-ORDER"], "float32", Implementation("cpu"), Options())
    assert verdict.state is State.FALSIFIED
    assert verdict.reason.startswith("asked corpora.epoch_order(")


def test_questions_show_plain_values() -> None:
    assert (
        question("files", "read", (Path("/somewhere/a.json"), {"epochs": 2}), {"strict": True})
        == "files.read(a.json, epochs=2, strict=True)"
    )
