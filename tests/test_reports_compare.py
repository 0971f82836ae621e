from pathlib import Path
from typing import Any

import pytest
from reports_factory import end_record, run_record, verdict, write, write_records

from blackswan.reports.__main__ import main
from blackswan.reports.compare import compare
from blackswan.reports.records import read


def changes(path: Path, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[tuple[bool | None, str]]:
    before, after = read(write(path / "old.jsonl", *old)), read(write(path / "new.jsonl", *new))
    return [(change.worse, str(change)) for change in compare(before, after)]


def at(worst: float | str) -> dict[str, Any]:
    return verdict(headroom={"worst": worst, "metric": "rms", "tensor": "y"})


@pytest.mark.parametrize(
    ("old", "new", "worse"),
    [
        ("HELD", "FALSIFIED", True),
        ("HELD", "NOT_RUN", True),
        ("HELD", "VACUOUS", True),
        ("FALSIFIED", "NOT_RUN", True),
        ("FALSIFIED", "FLAKY", True),
        ("NOT_RUN", "FALSIFIED", True),
        ("FALSIFIED", "HELD", False),
        ("NOT_RUN", "HELD", False),
    ],
)
def test_only_held_is_an_improvement(tmp_path: Path, old: str, new: str, worse: bool) -> None:
    [(found, text)] = changes(tmp_path, [verdict(state=old)], [verdict(state=new)])
    assert found is worse
    assert "FWD-RMSNORM bfloat16 cpu" in text


@pytest.mark.parametrize(
    ("old", "new", "worse"), [(0.2, 0.31, True), (0.2, 0.3, None), (0.31, 0.2, False), (0, 1e-9, True), (1e-9, 0, False), (0, 0, None)]
)
def test_headroom_counts_beyond_the_factor(tmp_path: Path, old: float, new: float, worse: bool | None) -> None:
    found = changes(tmp_path, [at(old)], [at(new)])
    assert [change for change, _ in found] == ([] if worse is None else [worse])


@pytest.mark.parametrize("changed", [{"seed": 1}, {"effort": "deep"}])
def test_headroom_on_other_cases_is_neither_better_nor_worse(tmp_path: Path, changed: dict[str, Any]) -> None:
    before = write(tmp_path / "old.jsonl", at(0.2))
    for headroom in (0.1, 0.9):
        after = write(tmp_path / "new.jsonl", at(headroom), header=run_record(**changed))
        assert [change.worse for change in compare(read(before), read(after))] == [None]
        assert main(["compare", str(before), str(after)]) == 0
    broken = write(tmp_path / "new.jsonl", verdict(state="FALSIFIED"), header=run_record(**changed))
    assert [change.worse for change in compare(read(before), read(broken))] == [True]


@pytest.mark.parametrize(("old", "new", "expected"), [(3, "nan", [True]), ("inf", "nan", []), ("inf", 3, [False])])
def test_headroom_that_is_not_finite(tmp_path: Path, old: float | str, new: float | str, expected: list[bool]) -> None:
    before = {**verdict(state="FALSIFIED"), "headroom": at(old)["headroom"]}
    after = {**verdict(state="FALSIFIED"), "headroom": at(new)["headroom"]}
    assert [change for change, _ in changes(tmp_path, [before], [after])] == expected


def test_missing_and_new_verdicts(tmp_path: Path) -> None:
    old = [verdict("GONE"), verdict("GONE-NOT-RUN", "NOT_RUN")]
    new = [verdict("NEW"), verdict("NEW-BROKEN", "FALSIFIED")]
    found = {text.split()[1].rstrip(":"): worse for worse, text in changes(tmp_path, old, new)}
    assert found == {"GONE": True, "GONE-NOT-RUN": None, "NEW": None, "NEW-BROKEN": True}


def test_exit_status_says_whether_something_got_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = str(write(tmp_path / "held.jsonl", verdict()))
    broken = str(write(tmp_path / "broken.jsonl", verdict(state="FALSIFIED"), header=run_record(seed=1)))
    assert main(["compare", held, held]) == 0
    assert "nothing changed" in capsys.readouterr().out
    assert main(["compare", held, broken]) == 1
    output = capsys.readouterr().out
    assert "worse   FWD-RMSNORM bfloat16 cpu: held → falsified" in output
    assert "the runs differ in seed: 0 → 1" in output
    assert "1 changed, 1 worse" in output
    assert main(["compare", broken, held]) == 0
    assert main(["compare", held, str(tmp_path / "absent.jsonl")]) == 2


def test_interrupted_run_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old.jsonl", verdict("A"), verdict("B"))
    new = write(tmp_path / "new.jsonl", verdict("A"), end=False)
    assert main(["compare", str(old), str(new)]) == 1
    output = capsys.readouterr().out
    assert f"note: {new}: the run was interrupted" in output
    assert "held → missing" in output


def compared(path: Path, old: dict[str, Any], new: dict[str, Any], **header: Any) -> tuple[int, list[bool | None]]:
    """Exit status, and what got worse."""
    before, after = write(path / "old.jsonl", old), write(path / "new.jsonl", new, header=run_record(**header))
    return main(["compare", str(before), str(after)]), [change.worse for change in compare(read(before), read(after))]


def test_fewer_cases_compared_are_worse(tmp_path: Path) -> None:
    old = verdict(cases={"run": 40, "compared": 40, "rejected": 0})
    new = verdict(cases={"run": 40, "compared": 26, "rejected": 14})
    assert compared(tmp_path, old, new) == (1, [True])
    assert compared(tmp_path, new, old) == (0, [])
    for other in ({"seed": 1}, {"replay": "case.npz"}, {"model": {"path": "own", "digest": "0" * 64}}):
        assert compared(tmp_path, old, new, **other) == (0, [None])
    assert compared(tmp_path, old, new, model={"path": "elsewhere", "digest": "m" * 64}) == (1, [True])
    assert compared(tmp_path, old, {**new, "cases": {"run": 40, "compared": 27, "rejected": 13}}) == (0, [])


def test_headroom_of_a_claim_that_has_changed_is_neither_better_nor_worse(tmp_path: Path) -> None:
    loosened = {**at(0.01), "digests": {**at(0.01)["digests"], "claim": "0" * 64}}
    assert compared(tmp_path, at(0.9), loosened) == (0, [None])
    assert compared(tmp_path, at(0.9), at(0.01)) == (0, [False])


def test_severity_and_known_failures_are_told(tmp_path: Path) -> None:
    known = verdict(state="FALSIFIED", known_failure={"reason": "slow", "expiry": "2099-01-01"})
    assert compared(tmp_path, verdict(), verdict(severity="P2")) == (0, [None])
    assert compared(tmp_path, known, verdict(state="FALSIFIED")) == (1, [True])
    assert compared(tmp_path, verdict(state="FALSIFIED"), known) == (0, [None])


def test_an_excuse_that_expired_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = verdict(state="FALSIFIED", known_failure={"reason": "slow", "expiry": "2025-03-01"})
    assert compared(tmp_path, known, known)[0] == 0
    assert compared(tmp_path, known, known, started="2025-03-02T10:00:00Z")[0] == 1
    assert "result: KNOWN FAILURES ONLY → FALSIFIED" in capsys.readouterr().out


def test_a_run_that_failed_otherwise_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old.jsonl", verdict())
    new = write_records(tmp_path / "new.jsonl", run_record(), verdict(), end_record(verdict(), exit_status=1))
    assert main(["compare", str(old), str(new)]) == 1
    assert "result: HELD → FAILED" in capsys.readouterr().out
    assert main(["compare", str(new), str(old)]) == 0


def test_what_was_run_differently_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"replay": "case.npz", "model": {"path": "own", "digest": "0" * 64}, "versions": {**run_record()["versions"], "torch": "9"}}
    compared(tmp_path, verdict(), verdict(), **changes)
    output = capsys.readouterr().out
    for name in ("replay: None → case.npz", "model.path: checkpoints/tiny → own", "versions.torch: 2.13.0 → 9"):
        assert f"the runs differ in {name}" in output
    assert "versions.numpy" not in output
