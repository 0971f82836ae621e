"""The benchmark of the reference's speed: what it says follows from the runs, and both sides compute the same."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import reference_speed
from benchmarks.reference_speed import WHO, Peak, summary

RUN = {"seconds": [3.0, 1.0, 2.0], "bytes": 100, "loss": 2.0}


def test_ratios_are_of_medians_and_of_the_largest_memory() -> None:
    other = {"seconds": [4.0, 4.0, 5.0], "bytes": 300, "loss": 2.0 + 1e-7}
    found = summary({"reference": [RUN, {**RUN, "bytes": 150}], "transformers": [other]}, 6, 256)
    assert found["time_ratio"] == 0.5
    assert found["memory_ratio"] == 0.5
    assert "6 of the 24 layers" in reference_speed._shown(found)


def test_two_that_compute_something_else_are_not_compared() -> None:
    with pytest.raises(ValueError, match="do not compute the same"):
        summary({"reference": [RUN], "transformers": [{**RUN, "loss": 2.1}]}, 6, 256)


def test_both_sides_have_the_same_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"vocab": 50, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}
    monkeypatch.setattr(reference_speed, "SHAPE", {**reference_speed.SHAPE, **small})
    reference_speed._write(tmp_path / "weights", reference_speed._scalars(2))
    losses = {who: reference_speed._work(who, tmp_path / "weights", 2, 7, 1)["loss"] for who in WHO}
    assert losses["reference"] == pytest.approx(losses["transformers"], rel=1e-5)


def test_the_peak_is_what_was_held_at_most() -> None:
    with Peak() as peak:
        block = np.ones(2**23)
        for _ in range(20):
            block = block * 1.0
        del block
    assert 2**26 * 0.9 < peak.bytes < 2**26 * 4
