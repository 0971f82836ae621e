"""Going on with an interrupted run."""

import json
from pathlib import Path
from typing import Any

import pytest
from reports_factory import reseal

from blackswan import contracts
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.runner.campaign import Campaign, Selection
from blackswan.falsifiers.runner.engine import Options, cases
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.subjects.reference import ReferenceSubject
from blackswan.reports.records import read

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
    reseal(path)
    run = campaign(path)
    run.resume()
    assert run.kept == []


def judged(path: Path, *states: str) -> None:
    """Gives the file's verdicts other outcomes, in a run that was killed after them."""
    header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:-1]]
    lines = [line | {"state": state, "reason": "by hand"} for line, state in zip(lines, states, strict=True)]
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)), encoding="utf-8")
    reseal(path)


def test_what_did_not_hold_and_is_not_attacked_again_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    states = ["NOT_RUN", "FALSIFIED", "VACUOUS", "FLAKY"]
    interrupted(path, len(states))
    judged(path, *states)
    for left in (states[1:], states[2:]):
        run = campaign(path)
        run.resume()
        again = next(iter(run.targets()))
        run.keep_except([again])
        assert [verdict.state.value for verdict in run.kept_failures] == left
        run.open()
        assert run.attack(again).state is State.HELD
        run.close(0, interrupted=False)
        assert {record["state"] for record in read(path).verdicts} == {"HELD", *left}


def test_what_was_to_be_attacked_again_and_was_not_stays_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    interrupted(path, 1)
    judged(path, "FALSIFIED")
    run = campaign(path)
    run.resume()
    run.keep_except(run.targets())
    assert run.kept == []
    run.open()
    run.close(2, interrupted=True)
    assert [record["state"] for record in read(path).verdicts] == ["FALSIFIED"]


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
    reseal(path)
    with pytest.raises(ValueError, match=f"other {key}"):
        campaign(path).resume()


def test_a_replay_of_one_case_is_not_taken_for_an_attack(tmp_path: Path) -> None:
    path = tmp_path / "v.jsonl"
    replay = campaign(path)
    replay.replayed = tmp_path / "case.npz"
    target = next(iter(replay.targets()))
    replay.open()
    replay.replay(target.claim, next(iter(cases(target.claim, target.dtype, Options(examples=1)))))
    replay.close(0, interrupted=False)
    assert [record["state"] for record in read(path).verdicts] == ["HELD"]
    with pytest.raises(ValueError, match="replay of one stored case"):
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
