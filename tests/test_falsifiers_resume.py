"""Going on with an interrupted run."""

import json
from pathlib import Path
from typing import Any

import pytest

import contracts
from falsifiers.campaign import Campaign, Selection
from falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from falsifiers.engine import Options
from falsifiers.real_input import RealInput
from falsifiers.subjects.reference import ReferenceSubject
from falsifiers.verdict import State
from reports.records import read

CLAIMS = ("OP-SWIGLU", "OPT-CLIP", "OP-SOFTMAX")


def campaign(path: Path, **options: Any) -> Campaign:
    chosen = Options(**{"effort": "quick", **options})
    return Campaign(ReferenceSubject(), contracts.load(), chosen, Selection(CLAIMS), RealInput(CHECKPOINT, CORPUS_HELDOUT), path)


def interrupted(path: Path, after: int) -> Campaign:
    run = campaign(path)
    run.open()
    for target in list(run.targets())[:after]:
        run.attack(target)
    run.close(2, interrupted=True)
    return run


def test_a_resumed_run_attacks_what_is_left_and_its_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    first = interrupted(path, 2)
    run = campaign(path)
    run.resume()
    left = list(run.targets())
    assert {(t.claim.id, t.dtype) for t in left}.isdisjoint({(v.claim.id, v.dtype) for v in first.verdicts})
    assert len(left) + 2 == len(list(campaign(path).targets()))
    run.open()
    for target in left:
        run.attack(target)
    run.close(0, interrupted=False)
    stored = read(path)
    assert not stored.interrupted
    assert len(stored.verdicts) == len(left) + 2
    assert [v.tally.run for v in run.verdicts[:2]] == [v.tally.run for v in first.verdicts]
    assert run.verdicts[0].tally.worst is not None


def test_a_killed_run_without_an_end_and_with_half_a_line_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    interrupted(path, 2)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines[:2]) + "\n" + lines[2][:40], encoding="utf-8")
    run = campaign(path)
    run.resume()
    assert len(run.kept) == 1


def test_what_did_not_hold_is_attacked_again(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    interrupted(path, 1)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:2]]
    lines[1] |= {"state": State.VACUOUS.value, "reason": "nothing was compared"}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run = campaign(path)
    run.resume()
    assert run.kept == []


@pytest.mark.parametrize(("key", "value"), [("seed", 7), ("effort", "deep"), ("device", "cuda:0"), ("digests", None), ("versions", {})])
def test_another_run_is_not_resumed(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "v.jsonl"
    interrupted(path, 1)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lines[0][key] = (
        {**lines[0]["digests"], "impl": "0" * 64}
        if key == "digests"
        else value
        if key != "versions"
        else {**lines[0]["versions"], "numpy": "1"}
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with pytest.raises(ValueError, match=f"other {key}"):
        campaign(path).resume()


def test_a_file_that_is_no_verdict_file_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    path.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(ValueError, match="--resume"):
        campaign(path).resume()


def test_without_a_file_everything_is_attacked(tmp_path: Path) -> None:
    run = campaign(tmp_path / "v.jsonl")
    run.resume()
    assert run.kept == []
