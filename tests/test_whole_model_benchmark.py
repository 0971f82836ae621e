"""The benchmark of the reference's speed: what it says follows from the runs, and both sides compute the same."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks import reference_speed
from benchmarks.command import CannotRun
from benchmarks.reference_speed import WHO, Peak, Worker, summary

RUN = {"seconds": [3.0, 1.0, 2.0], "bytes": 100, "loss": 2.0}


def test_ratios_are_of_one_round_each_and_of_the_memory() -> None:
    other = {"seconds": [4.0, 4.0, 8.0], "bytes": 200, "loss": 2.0 + 1e-7}
    found = summary({"reference": RUN, "transformers": other}, 6, 256)
    assert found["seconds"] == {"reference": 2.0, "transformers": 4.0}
    assert (found["time_ratio_least"], found["time_ratio"], found["time_ratio_most"]) == (0.25, 0.25, 0.75)
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


def test_a_process_that_has_no_answer_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = argparse.Namespace(layers=1, tokens=3)
    with pytest.raises(CannotRun, match=r"the process of reference ended with status [12] before"):
        Worker("reference", tmp_path / "missing", options).__enter__()
    assert "missing" in capfd.readouterr().err


def test_the_peak_is_what_was_held_at_most() -> None:
    with Peak() as peak:
        block = np.ones(2**23)
        for _ in range(20):
            block = block * 1.0
        del block
    assert 2**26 * 0.9 < peak.bytes < 2**26 * 4
