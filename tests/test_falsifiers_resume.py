"""Going on with an interrupted run: what held in its file is not attacked again, and no verdict of it is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
from falsifiers_claims import LOADED
from reports_factory import reseal

from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.runner.campaign import Campaign, Selection
from blackswan.falsifiers.runner.engine import Options
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.verdict_file import VerdictFile
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reports.records import read

CHOSEN = ("OP-SWIGLU", "OPT-CLIP", "OP-SOFTMAX")


def file(path: Path, **options: Any) -> VerdictFile:
    """The verdict file of a new run on three claims."""
    chosen = Options(**{"effort": "quick", **options})
    return VerdictFile(Campaign(ReferenceSubject(), LOADED, chosen, Selection(CHOSEN), RealInput(CHECKPOINT, CORPUS_HELDOUT), path))


def resumed(path: Path) -> VerdictFile:
    """That of a run which goes on with it."""
    found = file(path)
    found.resume()
    return found


def attack(run: VerdictFile, most: int | None = None) -> None:
    """Attacks what is left, or the first of it, and closes the file."""
    run.open()
    for target in list(run.campaign.targets())[:most]:
        run.add(run.campaign.record(run.campaign.attack(target)))
    run.keep_the_rest()
    run.close(2, interrupted=most is not None)


def judged(path: Path, *states: str) -> None:
    """A file whose verdicts have these states, of a run that was killed after them."""
    attack(file(path), len(states))
    header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:-1]]
    lines = [
        line | {"state": state} | ({} if state == "HELD" else {"reason": "by hand"}) for line, state in zip(lines, states, strict=True)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)), encoding="utf-8")
    reseal(path)


def test_a_resumed_run_attacks_what_is_left_and_its_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    judged(path, "HELD", "HELD")
    first = read(path).verdicts
    run = resumed(path)
    left = list(run.campaign.targets())
    assert {target.key for target in left}.isdisjoint({(record["claim"], record["dtype"], record["device"]) for record in first})
    assert len(left) + 2 == len(list(file(path).campaign.targets()))
    attack(run)
    stored = read(path)
    assert not stored.interrupted
    assert stored.verdicts[:2] == first
    assert len(stored.verdicts) == len(left) + 2


def test_a_killed_run_with_half_a_line_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    judged(path, "HELD", "HELD")
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.rindex("{")] + text[text.rindex("{") :][:40], encoding="utf-8")
    assert len(resumed(path).records) == 1


@pytest.mark.parametrize("state", ["FALSIFIED", "NOT_RUN", "VACUOUS", "FLAKY"])
def test_what_did_not_hold_is_attacked_again(tmp_path: Path, state: str) -> None:
    path = tmp_path / "v.jsonl"
    judged(path, state)
    run = resumed(path)
    assert run.records == {}
    attack(run, 1)
    assert [record["state"] for record in read(path).verdicts] == ["HELD"]


def test_what_did_not_hold_and_is_not_attacked_again_stays_in_the_file_and_fails(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    judged(path, "NOT_RUN", "FALSIFIED", "VACUOUS", "FLAKY")
    run = resumed(path)
    attack(run, 1)
    assert {record["state"] for record in read(path).verdicts} == {"HELD", "FALSIFIED", "VACUOUS", "FLAKY"}
    assert {record["state"] for record in run.failures} == {"FALSIFIED", "VACUOUS", "FLAKY"}


@pytest.mark.parametrize(
    ("key", "value"), [("seed", 7), ("effort", "deep"), ("device", "cuda:0"), ("digests", "impl"), ("versions", "numpy")]
)
def test_another_run_is_not_resumed(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "v.jsonl"
    judged(path, "HELD")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[0][key] = {**lines[0][key], value: "0" * 64} if key in ("digests", "versions") else value
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    reseal(path)
    with pytest.raises(ValueError, match=f"other {key}"):
        resumed(path)


def test_a_replay_of_one_case_is_not_taken_for_an_attack(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    replay = file(path)
    replay.replayed = tmp_path / "case.npz"
    attack(replay, 1)
    with pytest.raises(ValueError, match="replay of one stored case"):
        resumed(path)


def test_a_file_that_is_no_verdict_file_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    path.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="--resume"):
        resumed(path)


def test_without_a_file_everything_is_attacked(tmp_path: Path) -> None:
    assert resumed(tmp_path / "v.jsonl").records == {}
