"""Factors of contracts come from calibrations, and none is looser than its calibration says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from falsifiers_claims import CLAIMS, LOADED

from blackswan import contracts
from blackswan.contracts import ContractError
from blackswan.contracts.model import Claim, Factors
from blackswan.contracts.vocabulary import CALIBRATION, load_factors
from blackswan.falsifiers.__main__ import main
from blackswan.falsifiers.numeric import calibration_record
from blackswan.falsifiers.numeric.calibration import Calibrating, calibrate
from blackswan.falsifiers.numeric.comparison import METRICS, Errors
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.impl.device import EXIT_STATUS
from blackswan.reference.operations import TABLE
from blackswan.reference.table import Operation

RECORD = calibration_record.read()
CALIBRATED = {name: claim for name, claim in CLAIMS.items() if claim.tolerance and claim.tolerance.basis == "rounding"}


def looser(claim: Claim, record: calibration_record.Record) -> list[str]:
    """The factors of a claim that its calibrations do not justify."""
    found = []
    for dtype, factors in claim.tolerance.factors.items():
        allowed = calibration_record.factors(record, claim.id, dtype)
        found += [
            f"{claim.id} {dtype} {metric}: {getattr(factors, metric)} > {allowed[metric]}"
            for metric in METRICS
            if getattr(factors, metric) > allowed[metric]
        ]
    return found


def test_a_tensor_that_many_replays_reject_counts_for_nothing() -> None:
    attack = Calibrating(CLAIMS["OP-LINEAR"], ReferenceSubject(), "float32")
    floors = iter([0.01, 1.0])
    expected, actual = {"y": np.ones((1, 4))}, {"y": np.full((1, 4), 1.05, np.float32)}
    attack.judge(expected, actual, lambda: {"y": Errors.flat(next(floors))}, {"y": np.dtype(np.float32)})
    assert next(floors, None) is None, "the floor of many replays has to be asked for"
    assert attack.ratios == []


def test_no_factor_is_looser_than_its_calibration() -> None:
    assert CALIBRATED.keys() - RECORD.keys() == set(), "never calibrated: python -m falsifiers calibrate --claim ID --write"
    assert [line for claim in CALIBRATED.values() for line in looser(claim, RECORD)] == []


def test_a_loosened_factor_is_found() -> None:
    claim = CLAIMS["OP-LINEAR"]
    tightened: dict[str, Any] = json.loads(json.dumps(RECORD))
    for entry in tightened["OP-LINEAR"]["float32"].values():
        entry["largest"]["max"] /= 2
    assert any("float32 max" in line for line in looser(claim, tightened))


def test_every_calibration_says_how_large_and_where() -> None:
    for claim, by_dtype in RECORD.items():
        for dtype, by_machine in by_dtype.items():
            for machine, entry in by_machine.items():
                assert machine, (claim, dtype)
                assert entry["device"], (claim, dtype)
                assert entry["torch"], (claim, dtype)
                assert entry["cases"] >= 4 or entry["tensors"] >= 100, (claim, dtype, machine)  # a whole model has hundreds
                assert all(np.isfinite(entry["largest"][metric]) for metric in METRICS), (claim, dtype, machine)


def test_a_wrong_implementation_calibrates_far_above_the_right_one() -> None:
    claim = CLAIMS["OP-SWIGLU"]
    right = calibrate(claim, "float32", ReferenceSubject(), 5, 0, None)
    swapped = Operation(lambda gate, up: TABLE["swiglu"].forward(gate=up, up=gate))
    wrong = calibrate(claim, "float32", ReferenceSubject({**TABLE, "swiglu": swapped}), 5, 0, None)
    assert right["largest"]["rms"] <= 1.0
    assert wrong["largest"]["rms"] > 1e3
    assert right["cases"] == wrong["cases"]
    assert right["cases"] >= 15


@pytest.mark.parametrize(("value", "expected"), [(1.0, 1.0), (1.01, 1.1), (1.2349, 1.3), (12.01, 13.0), (0.1234, 0.13), (100.5, 110.0)])
def test_rounding_up_never_rounds_down(value: float, expected: float) -> None:
    assert calibration_record.rounded_up(value) == expected


def test_a_factor_is_the_worst_machine_with_the_margin_and_at_least_one() -> None:
    entry = {"claim": "A", "dtype": "float32", "cases": 9, "device": "cpu", "torch": "2"}
    record = {
        "A": {
            "float32": {
                "one": {**entry, "largest": {"rms": 2.0, "row": 0.1, "max": 1.0}},
                "other": {**entry, "largest": {"rms": 1.0, "row": 0.2, "max": 3.0}},
            }
        }
    }
    assert calibration_record.factors(record, "A", "float32") == {"rms": 3.0, "row": 1.0, "max": 4.5}


def test_samples_of_one_machine_are_joined_and_those_of_others_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    entry = {"claim": "A", "dtype": "float32", "machine": "one", "torch": "2.11", "device": "cpu", "seed": 1, "cases": 5, "tensors": 7}
    ratios = {"largest": {"rms": 2.0, "row": 1.0, "max": 1.0}, "median": {"rms": 0.5, "row": 0.5, "max": 0.5}}
    other = {"seed": 2, "cases": 4, "largest": {"rms": 1.0, "row": 3.0, "max": 1.0}, "median": {"rms": 0.1, "row": 0.1, "max": 0.1}}
    calibration_record.add([{**entry, **ratios}], path)
    calibration_record.add([{**entry, **ratios, "machine": "other"}], path)
    calibration_record.add([{**entry, **other}], path)
    joined = calibration_record.read(path)["A"]["float32"]["one"]
    assert joined["largest"] == {"rms": 2.0, "row": 3.0, "max": 1.0}
    assert joined["median"] == ratios["median"], "of the longer sample"
    assert (joined["cases"], joined["tensors"], joined["seeds"]) == (9, 14, [1, 2])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="A in float32 on one holds seed 2 already, beside others: nothing was merged"):
        calibration_record.add([{**entry, **ratios, "machine": "third"}, {**entry, **other}], path)
    assert path.read_bytes() == before
    assert calibration_record.read(path)["A"]["float32"]["other"]["cases"] == 5


def test_the_same_seed_again_replaces_the_sample_and_another_torch_has_its_own(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    entry = {"claim": "A", "dtype": "float32", "machine": "one", "torch": "2.11", "device": "cpu", "seed": 1, "cases": 5, "tensors": 7}
    for rms, change in ((2.0, {}), (1.0, {}), (1.5, {"torch": "2.12"}), (1.2, {"torch": "2.12", "seed": 2})):
        ratios = {name: {"rms": rms, "row": 1.0, "max": 1.0} for name in ("largest", "median")}
        calibration_record.add([{**entry, **change, **ratios}], path)
    by_machine = calibration_record.read(path)["A"]["float32"]
    found = {name: (entry["largest"]["rms"], entry["cases"]) for name, entry in by_machine.items()}
    assert found == {"one": (1.0, 5), "one, torch 2.12": (1.5, 10)}


def test_writing_factors_changes_one_line_of_the_file_that_contracts_read(tmp_path: Path) -> None:
    path = tmp_path / CALIBRATION.name
    before = CALIBRATION.read_text(encoding="utf-8")
    path.write_text(before, encoding="utf-8")
    calibration_record.write_factors({"OP-LINEAR": {"bfloat16": {"rms": 9.5, "row": 9.0, "max": 9.0}}}, path)
    changed = [(a, b) for a, b in zip(before.splitlines(), path.read_text(encoding="utf-8").splitlines(), strict=True) if a != b]
    assert len(changed) == 1
    assert load_factors(path)["OP-LINEAR"] == {**load_factors()["OP-LINEAR"], "bfloat16": Factors(9.5, 9.0, 9.0)}


def test_the_record_and_the_factors_are_as_the_command_writes_them(tmp_path: Path) -> None:
    record, factors = tmp_path / "record.json", tmp_path / "factors.json"
    record.write_bytes(calibration_record.RECORD.read_bytes())
    calibration_record.add([], record)
    assert record.read_bytes() == calibration_record.RECORD.read_bytes()
    factors.write_bytes(CALIBRATION.read_bytes())
    calibration_record.write_factors({}, factors)
    assert factors.read_bytes() == CALIBRATION.read_bytes()


def test_factors_stand_in_one_file_for_every_claim_and_dtype_and_for_no_other() -> None:
    assert {claim.id: set(claim.domain.dtype) for claim in CALIBRATED.values()} == {name: set(by) for name, by in load_factors().items()}
    assert [claim.id for claim in CALIBRATED.values() if "factors" in claim.content["tolerance"]] == []


def test_a_claim_without_factors_is_loaded_to_be_calibrated_and_refused_otherwise() -> None:
    measured = {name: dict(by_dtype) for name, by_dtype in load_factors().items()}
    del measured["OP-LINEAR"]["bfloat16"]
    vocabulary = contracts.load_vocabulary()
    with pytest.raises(ContractError) as caught:
        contracts.load(vocabulary=replace(vocabulary, factors=measured))
    assert len(caught.value.problems) == 1
    assert "calibrate --claim OP-LINEAR --dtype bfloat16 --write" in str(caught.value)
    assert "decoder-operations-v1.yaml:" in str(caught.value)
    loaded = {claim.id: claim for contract in contracts.load(vocabulary=replace(vocabulary, factors=None)) for claim in contract.claims}
    tolerance = loaded["OP-LINEAR"].tolerance
    assert tolerance.factors["bfloat16"] == Factors(1.0, 1.0, 1.0)


def test_the_command_measures_and_appends_lines(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    for seed in ("1", "2"):
        chosen = ["--claim", "OP-RESIDUAL-GRADIENT", "--claim", "OP-SWIGLU", "--dtype", "float32"]
        assert main(["calibrate", *chosen, "--cases", "2", "--seed", seed, "--lines", str(lines)]) == 0
    entries = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [(entry["claim"], entry["seed"]) for entry in entries] == [("OP-SWIGLU", 1), ("OP-SWIGLU", 2)]  # exact claims have no factors
    assert entries[0]["largest"]["rms"] > 0
    assert calibration_record.merged(lines, CALIBRATED) == entries


def test_an_unknown_claim_is_a_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--claim", "OP-LINAER"]) == 2
    assert "OP-LINEAR" in capsys.readouterr().err


LINE: dict[str, Any] = {
    "claim": "OP-LINEAR",
    "dtype": "float32",
    "device": "cpu",
    "machine": "one",
    "torch": "2.11",
    "seed": 1,
    "cases": 5,
    "tensors": 7,
    "largest": {"rms": 2.0, "row": 1, "max": 1.0},
    "median": {"rms": 0.5, "row": 0.5, "max": 0.5},
}
BAD_LINES: list[tuple[str, str]] = [
    ('{"claim": "OP-RMSNORM"}', "the line: 'dtype' is a required property"),
    ("[1]", "the line: [1] is not of type 'object'"),
    ("", "Expecting value"),
    ("[" * 100_000, "nested too deeply"),
    (json.dumps(LINE)[:-1] + ', "seed": 2}', "key 'seed' is given twice"),
    (json.dumps({**LINE, "surprise": 1}), "the line: Additional properties are not allowed ('surprise' was unexpected)"),
    (json.dumps({**LINE, "claim": "OP-LINAER"}), "unknown claim 'OP-LINAER'"),
    (json.dumps({**LINE, "dtype": "float8"}), "unknown dtype 'float8'"),
    (json.dumps({**LINE, "machine": None}), "machine: None is not of type 'string'"),
    (json.dumps({**LINE, "median": {"rms": 1.0, "max": 1.0}}), "median: 'row' is a required property"),
    (json.dumps({**LINE, "largest": {**LINE["largest"], "row": float("nan")}}), "no JSON number"),
    *((json.dumps({**LINE, "largest": {**LINE["largest"], "row": value}}), "largest.row: ") for value in (-1.0, 10**400, True)),
]


def merge(file: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and errors of a merge."""
    return main(["merge", str(file)]), capsys.readouterr().err


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a merge would have written, instead of writing it."""
    written: list[Any] = []

    def add(entries: Any) -> calibration_record.Record:
        written.extend(entries)
        return {}

    monkeypatch.setattr(contracts, "load", lambda **_: LOADED)
    monkeypatch.setattr(calibration_record, "add", add)
    monkeypatch.setattr(calibration_record, "write_factors", lambda new: written.extend(new))
    return written


@pytest.mark.parametrize(("line", "words"), BAD_LINES)
def test_a_merge_of_what_is_no_calibration_is_one_line_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], untouched: list[Any], line: str, words: str
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(json.dumps(LINE) + "\n" + line + "\n", encoding="utf-8")
    status, error = merge(file, capsys)
    assert (status, untouched) == (2, [])
    assert error.startswith(f"falsifiers merge: {file}:2: ")
    assert words in error
    assert error.count("\n") == 1
    assert len(error) < 600


@pytest.mark.parametrize("content", [b"", b"\xff\n"])
def test_a_merge_of_no_lines_or_no_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], untouched: list[Any], content: bytes
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(content)
    status, error = merge(file, capsys)
    assert (status, untouched) == (2, [])
    assert str(file) in error


def test_a_merge_writes_every_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], untouched: list[Any]) -> None:
    lines = [LINE, {**LINE, "dtype": "bfloat16", "seed": 2}]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert merge(file, capsys) == (0, "")
    assert untouched == lines


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_device_that_is_not_there_is_one_line(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--claim", "OP-LINEAR", "--device", "cuda:15", "--jobs", jobs]) == EXIT_STATUS
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("falsifiers calibrate: device 'cuda:15': this host has")
    assert found.err.count("\n") == 1
