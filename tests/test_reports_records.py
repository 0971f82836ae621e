import json
import sys
from pathlib import Path
from typing import Any

import pytest
from reports_factory import COUNTEREXAMPLE, CULPRIT, end_record, run_record, verdict, write, write_records

from blackswan.reports import records
from blackswan.reports.__main__ import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def refused(file: Path) -> str:
    """The message of a refusal, which names the file."""
    with pytest.raises(records.RecordError) as caught:
        records.read(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    return message.removeprefix(str(file))


def test_every_state_is_read(file: Path) -> None:
    written = [verdict(f"CLAIM-{state}", state) for state in records.STATES]
    run = records.read(write(file, *written))
    assert [{**entry, "digest": ...} for entry in run.verdicts] == [{**entry, "digest": ...} for entry in written]
    assert run.header["subject"] == "impl"
    assert not run.interrupted
    assert run.notes == ()


def test_states_of_schema_and_reader_are_the_same() -> None:
    assert records.SCHEMA["$defs"]["state"]["enum"] == list(records.STATES)


def test_missing_end_is_an_interrupted_run(file: Path) -> None:
    run = records.read(write(file, verdict(), end=False))
    assert run.interrupted
    assert run.notes == ("the run was interrupted: the file has no end record",)
    assert len(run.verdicts) == 1


def test_end_that_says_interrupted_is_believed(file: Path) -> None:
    run = records.read(write_records(file, run_record(), verdict(), end_record(verdict(), interrupted=True)))
    assert run.interrupted
    assert "its end record says so" in run.notes[0]


@pytest.mark.parametrize("kept", [1, 20, 300, -2])
def test_truncated_last_line_is_noted_and_the_rest_used(file: Path, kept: int) -> None:
    write(file, verdict("FIRST"), end=False)
    with file.open("ab") as stream:
        stream.write((json.dumps(verdict("SECOND")) + "\n").encode()[:kept])
    run = records.read(file)
    assert [entry["claim"] for entry in run.verdicts] == ["FIRST"]
    assert run.notes[0] == "line 3 is truncated and was left out"
    assert run.interrupted


def test_last_line_without_line_break_is_whole(file: Path) -> None:
    write(file, verdict())
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    assert not records.read(file).interrupted


def test_broken_line_in_the_middle_is_refused(file: Path) -> None:
    write(file, verdict())
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], lines[1][:50], lines[2]]) + "\n")
    assert refused(file).startswith(":2: not strict JSON")


@pytest.mark.parametrize(
    ("content", "message"), [("\n\n", "is empty"), ("", "is empty"), ('{"record": "ru', ":1: not strict JSON"), (None, "No such file")]
)
def test_what_holds_no_run_is_refused(file: Path, content: str | None, message: str) -> None:
    if content is not None:
        file.write_text(content)
    assert message in refused(file)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("line_break", ["\n", ""])
def test_non_finite_numbers_are_no_json(file: Path, number: str, line_break: str) -> None:
    write(file, end=False)
    with file.open("a") as stream:
        stream.write(json.dumps(verdict()).replace("0.71", number) + line_break)
    message = refused(file)
    assert message.startswith(":2:")
    assert '"nan", "inf" and "-inf"' in message


@pytest.mark.parametrize("place", ["headroom", "seconds", "error"])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_that_no_float_holds_are_refused(file: Path, place: str, sign: int) -> None:
    huge = sign * 10**400
    changes: dict[str, Any] = {
        "headroom": {"headroom": {"worst": huge, "metric": "rms", "tensor": "y"}},
        "seconds": {"seconds": {"total": huge}},
        "error": {"counterexample": {**COUNTEREXAMPLE, "error": huge}},
    }[place]
    message = refused(write(file, verdict(state="FALSIFIED", **changes)))
    assert message.startswith(":2: not strict JSON")
    assert "expected a number that a float can hold" in message
    assert len(message) < 200


def test_the_largest_integers_that_a_float_holds_are_read_and_shown(file: Path) -> None:
    largest = int(sys.float_info.max)
    written = verdict(state="FALSIFIED", headroom={"worst": largest, "metric": "rms", "tensor": "y"}, seconds={"total": 10**15})
    assert main(["render", str(write(file, written)), "--output", str(file.parent / "out")]) == 0


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_non_finite_numbers_are_words(file: Path, word: str) -> None:
    counterexample = {**COUNTEREXAMPLE, "error": word, "actual": word, "ulp": word, "cosine": word}
    written = verdict(state="FALSIFIED", counterexample=counterexample, culprit={**CULPRIT, "distance": word})
    run = records.read(write(file, written))
    found = run.verdicts[0]["counterexample"]
    assert found["error"] == word


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"state": "PASSED"}, "expected one of HELD, FALSIFIED, NOT_RUN, VACUOUS, FLAKY"),
    ({"state": "HOLD"}, "did you mean HELD?"),
    ({"record": "verdikt"}, "did you mean verdict?"),
    ({"severity": "P9"}, "P0, P1, P2"),
    ({"surprise": 1}, "unknown key 'surprise'"),
    ({"statment": "x"}, "did you mean statement?"),
    ({"cases": {"run": -1, "compared": 1, "rejected": 0}}, "cases.run"),
    ({"cases": {"run": 1, "compared": 1}}, "'rejected' is a required property"),
    ({"headroom": {"worst": "infinite", "metric": "rms", "tensor": "y"}}, "headroom.worst"),
    ({"statement": ""}, "statement"),
    ({"counterexample": {**COUNTEREXAMPLE, "witness": 1}}, "witness"),
    ({"known_failure": {"reason": "slow", "expiry": "soon"}}, "known_failure.expiry"),
    ({"known_failure": {"reason": "slow", "expiry": "2025-02-30"}}, "known_failure.expiry"),
    ({"seconds": {"total": 10**16}}, "seconds.total"),
    ({"depends": {}}, "unknown key 'depends'"),
    ({"digests": {}}, "'claim' is a required property"),
    ({"seconds": {}}, "'total' is a required property"),
    ({"digest": None}, "SHA-256 of what the record says"),
]


@pytest.mark.parametrize(("changes", "expected"), CHANGES)
def test_record_that_breaks_the_schema_is_refused(file: Path, changes: dict[str, Any], expected: str) -> None:
    write_records(file, run_record(), {**verdict(state="FALSIFIED"), **changes})
    message = refused(file)
    assert message.startswith(":2:")
    assert expected in message


@pytest.mark.parametrize("moment", ["2026-99-99T99:99:99Z", "2026-02-30T00:00:00Z", "2026-01-01T24:01:00Z", "2026-01-01T00:00:00Z\n"])
def test_a_moment_that_there_is_not_is_refused(file: Path, moment: str) -> None:
    message = refused(write(file, header=run_record(started=moment)))
    assert message.startswith(":1: started")
    assert "such as 2025-03-01T10:00:00Z" in message
    assert refused(write_records(file, run_record(), end_record(finished=moment))).startswith(":2: finished")


@pytest.mark.parametrize(
    "moment", ["2024-02-29T23:59:59Z", "2026-01-01T00:00:00+00:00", "2026-01-01T00:00:00.25Z", "2026-01-01T00:00:00.1234567Z"]
)
def test_moments_are_read_with_and_without_fractions(file: Path, moment: str) -> None:
    assert records.read(write(file, header=run_record(started=moment))).header["started"] == moment


DISHONEST: list[tuple[dict[str, Any], str]] = [
    (verdict(cases={"run": 3, "compared": 0, "rejected": 3}), "compared nothing has not held"),
    (verdict(headroom={"worst": 1.01, "metric": "rms", "tensor": "y"}), "above its tolerance has not held"),
    (verdict(headroom={"worst": "nan", "metric": "rms", "tensor": "y"}), "above its tolerance has not held"),
    (verdict(counterexample=COUNTEREXAMPLE), "counterexample has not held"),
    (verdict(state="NOT_RUN", reason=None), "needs a reason"),
    (verdict(state="VACUOUS", reason=None), "needs a reason"),
    (verdict(state="FLAKY", reason=None), "needs a reason"),
    (verdict(state="FALSIFIED", counterexample=None), "needs a counterexample or a reason"),
]


@pytest.mark.parametrize(("record", "expected"), DISHONEST)
def test_verdict_that_contradicts_itself_is_refused(file: Path, record: dict[str, Any], expected: str) -> None:
    assert expected in refused(write(file, record))


@pytest.mark.parametrize("version", [0, 1, "2", None])
def test_other_schema_version_is_refused(file: Path, version: object) -> None:
    message = refused(write(file, header=run_record(schema=version)))
    assert message.startswith(":1: schema version")
    assert "knows version 4" in message


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([verdict()], ":1: a verdict record before the run record"),
        ([run_record(), run_record()], ":2: a second run record"),
        ([run_record(), verdict(), verdict()], ":3: a second verdict on cuda-forward-parity FWD-RMSNORM rms_norm bfloat16 cpu"),
        ([run_record(), end_record(), verdict()], ":3: a verdict record after the end record"),
        ([run_record(), verdict(), end_record()], ":3: the end record counts 0 HELD, the file holds 1"),
        ([run_record(), end_record(verdict(state="FALSIFIED"))], ":2: the end record counts 1 FALSIFIED, the file holds 0"),
        ([[1, 2]], ":1: a record is a JSON object"),
    ],
)
def test_records_in_the_wrong_place_are_refused(file: Path, lines: list[object], expected: str) -> None:
    assert expected in refused(write_records(file, *lines))


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"not json", b"[" * 200_000, b'{"record": "run", "record": "end"}', b'{"a": "\\ud800"}', b"1" * 5000]
)
def test_what_is_not_strict_json_is_refused_and_never_crashes(file: Path, line: bytes) -> None:
    write(file, end=False)
    file.write_bytes(file.read_bytes() + line + b"\n")
    assert refused(file).startswith(":2:")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"seed": 0', '"seed": 0, "seed": 1', "key 'seed' appears 2 times"),
        ('"subject": "impl"', r'"subject": "\ud800"', "surrogates not allowed"),
    ],
)
def test_valid_record_in_dubious_json_is_refused(file: Path, old: str, new: str, expected: str) -> None:
    text = json.dumps(run_record())
    assert old in text
    file.write_text(text.replace(old, new) + "\n")
    assert expected in refused(file)


def test_check_names_every_bad_file_and_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "good.jsonl", verdict())
    bad = write_records(tmp_path / "bad.jsonl", run_record(), verdict(state="PASSED"))
    cut = write(tmp_path / "cut.jsonl", verdict(), end=False)
    assert main(["check", str(bad), str(good), str(cut)]) == 2
    output = capsys.readouterr()
    assert f"{good}: valid, 1 verdicts; HELD: 1 held" in output.out
    assert f"{cut}: the run was interrupted" in output.out
    assert f"{bad}:2: state" in output.err
    assert main(["check", str(good)]) == 0


def test_no_more_cases_are_compared_than_were_run(tmp_path: Path) -> None:
    whole = verdict(cases={"run": 5, "compared": 3, "rejected": 2})
    assert records.read(write(tmp_path / "whole.jsonl", whole)).verdicts
    with pytest.raises(records.RecordError, match=r"more\.jsonl:2: cases: 4 compared and 2 rejected are more than the 5 that were run"):
        records.read(write(tmp_path / "more.jsonl", verdict(cases={"run": 5, "compared": 4, "rejected": 2})))


def edited(file: Path, old: str, new: str) -> Path:
    """The file with text replaced, as an editor would."""
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [("0.71", "0.17", 2), ('"seed": 0', '"seed": 1', 1), ('"exit_status": 0', '"exit_status": 3', 4), ("FWD-TWO", "FWD-SIX", 3)],
)
def test_an_edited_record_is_refused(file: Path, old: str, new: str, line: int) -> None:
    edited(write(file, verdict("FWD-ONE"), verdict("FWD-TWO")), old, new)
    assert refused(file).startswith(f":{line}: the record was edited after the run")


def test_the_layout_of_a_line_is_no_edit(file: Path) -> None:
    write(file, verdict())
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    file.write_text("".join(json.dumps(line, sort_keys=True, ensure_ascii=True) + "\n" for line in lines), encoding="utf-8")
    assert len(records.read(file).verdicts) == 1


def test_records_that_are_replaced_moved_or_removed_are_missed(file: Path, tmp_path: Path) -> None:
    header, one, two, end = write(file, verdict("FWD-ONE"), verdict("FWD-TWO")).read_text(encoding="utf-8").splitlines()
    other = write(tmp_path / "other.jsonl", verdict("FWD-ONE", cases={"run": 9, "compared": 9, "rejected": 0}))
    replaced = other.read_text(encoding="utf-8").splitlines()[1]
    for lines in ((header, replaced, two, end), (header, two, one, end), (header, one, end)):
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        assert "the end record's digest is of other lines" in refused(file)
