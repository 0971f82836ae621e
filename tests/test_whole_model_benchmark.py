"""The benchmark of the reference's speed: what it says follows from the runs, and both sides compute the same."""

import argparse
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reference_speed
from benchmarks.command import CannotRun
from benchmarks.reference_speed import WHO, Peak, Worker, summary

RUN = {"seconds": [3.0, 1.0, 2.0], "bytes": 100, "loss": 2.0}


def test_ratios_are_of_one_round_each_and_of_the_memory() -> None:
    other = {"seconds": [4.0, 4.0, 2.0], "bytes": 200, "loss": 2.0 + 1e-7}
    found = summary({"reference": RUN, "transformers": other}, 6, 256)
    assert found["seconds"] == {"reference": 2.0, "transformers": 4.0}
    assert (found["time_ratio_least"], found["time_ratio"], found["time_ratio_most"]) == (0.25, 0.75, 1.0)
    assert found["memory_ratio"] == 0.5
    assert "6 of the 24 layers" in reference_speed._shown(found)


def test_two_that_compute_something_else_are_not_compared() -> None:
    with pytest.raises(ValueError, match="do not compute the same"):
        summary({"reference": RUN, "transformers": {**RUN, "loss": 2.1}}, 6, 256)


def small(monkeypatch: pytest.MonkeyPatch, weights: Path) -> None:
    """A small model, and its weights in the file."""
    sizes = {"vocab": 50, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}
    monkeypatch.setattr(reference_speed, "SHAPE", {**reference_speed.SHAPE, **sizes})
    reference_speed._write(weights, reference_speed._scalars(2))


def test_both_sides_have_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, tmp_path / "weights")
    losses = {}
    for who in WHO:
        first, seconds, last = reference_speed._work(who, tmp_path / "weights", 2, 7, ["\n"])
        assert seconds > 0
        assert last["bytes"] >= 0
        assert first == last["loss"]
        losses[who] = first
    assert losses["reference"] == pytest.approx(losses["transformers"], rel=1e-5)


ECHO = """
import json, sys, time
print(json.dumps(0), flush=True)
for count, _ in enumerate(sys.stdin):
    print(json.dumps(time.monotonic()), flush=True)
print(json.dumps({"bytes": count, "loss": 1.0}), flush=True)
"""


def echo(who: str, text: str = ECHO) -> Worker:
    """A worker that says when it had its turns."""
    return Worker(who, [sys.executable, "-c", text])


def test_the_two_take_turns_pass_by_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(reference_speed, "Worker", lambda who, _: echo(who))
    found = reference_speed._in_turns(Path("weights"), argparse.Namespace(layers=1, tokens=3, rounds=3))
    ours, theirs = (found[who]["seconds"] for who in WHO)
    assert sorted([*ours, *theirs]) == [turn for both in zip(ours, theirs, strict=True) for turn in both]
    assert all(found[who]["bytes"] == 2 for who in WHO)
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [f"round {count} of 3" for count in (1, 2, 3)]


@pytest.mark.parametrize(
    "text", ["raise SystemExit(3)", "print(0, flush=True); input(); raise SystemExit(3)", "print(0); raise SystemExit(3)"]
)
def test_a_process_that_has_no_answer_is_named(text: str) -> None:
    def turn() -> None:
        with echo("reference", text) as worker:
            if "input" not in text:
                worker._process.wait()  # a pipe that nobody reads
            worker.turn()

    with pytest.raises(CannotRun, match="the process of reference ended with status 3 before"):
        turn()


def test_the_peak_is_what_was_held_at_most() -> None:
    with Peak() as peak:
        block = np.ones(2**23)
        for _ in range(20):
            block = block * 1.0
        del block
    assert 2**26 * 0.9 < peak.bytes < 2**26 * 4
