"""Whole runs: the file of their state, what starts and continues them, and refusals that change nothing."""

import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.fit import FitResult, StepRecord, fit
from blackswan.impl.folder import LOCK, sole_writer
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.samples import Samples
from blackswan.impl.trainer import Batch, BatchResult, Trainer
from blackswan.impl.training_state import STATE_FILE, Progress, load_state, save_state

ARCHITECTURE = DecoderConfig("qwen2", 260, 16, 24, 1, 2, 1, 8, 1e-6, 1e4, True, 64)
CONFIG = ClassifyConfig(
    num_classes=3, lora_rank=2, lora_alpha=4.0, batch_size=2, accumulation_steps=2, epochs=3, max_seq_len=16, learning_rate=3e-2
)
State = dict[str, torch.Tensor]


def samples(count: int, seed: int = 0, classes: int = 3) -> Samples:
    generator = random.Random(seed)
    rows = tuple(tuple(generator.randrange(256) for _ in range(generator.randrange(1, 9))) for _ in range(count))
    return Samples.of(rows, tuple(row[0] % classes for row in rows), classes)


TRAIN, VALIDATION = samples(10), samples(7, 1)


def pipeline(**settings: Any) -> ClassifyPipeline:
    return ClassifyPipeline.from_random(ARCHITECTURE, replace(CONFIG, **settings))


@pytest.fixture(autouse=True, scope="module")
def _without_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C means what it means in a terminal; a job in the background, and so its tests, would not be interrupted."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Watch:
    """The records of a run's steps, without their times; stops the run after a step."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.steps: list[StepRecord] = []
        self.stop_after = stop_after

    def step(self, record: StepRecord) -> None:
        self.steps.append(replace(record, seconds=0.0))
        if record.step == self.stop_after:
            raise RuntimeError


def run(output: Path, watch: Watch, resume: bool = False, validation: Samples | None = VALIDATION, **settings: Any) -> FitResult:
    return fit(pipeline(**settings), TRAIN, validation, output, resume=resume, save_every=1, on_step=watch.step)


def state_of(output: Path) -> State:
    found = load_state(output / "state")
    return found[1]


def test_a_step_of_one_batch_is_made_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    train_batch = Trainer.train_batch

    def counted(self: Trainer, batch: Batch) -> BatchResult:
        counts.append(len(batch.labels))
        return train_batch(self, batch)

    monkeypatch.setattr(Trainer, "train_batch", counted)
    run(tmp_path / "run", watch := Watch())
    assert counts == [2, 2, 2]
    assert [record.samples for record in watch.steps] == [4, 4, 2] * 3


def test_left_overs_of_a_kill_are_removed_by_the_next_writer(tmp_path: Path) -> None:
    (tmp_path / f".partial-{STATE_FILE}.x").write_bytes(b"torn")
    with sole_writer(tmp_path):
        save_state(tmp_path, Progress(run="r"), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, STATE_FILE]
    assert load_state(tmp_path / "nowhere") is None


def test_starting_and_continuing_are_not_confused(tmp_path: Path) -> None:
    run(tmp_path / "run", Watch(), epochs=1)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "state").mkdir()
    with pytest.raises(FileExistsError, match="holds a run already"):
        run(tmp_path / "half", Watch(), epochs=1)
    finished = Watch()
    assert run(tmp_path / "run", finished, resume=True, epochs=1).steps == 3
    assert finished.steps == []
    (tmp_path / "run" / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="not the run to continue"):
        run(tmp_path / "run", Watch(), resume=True, epochs=1)


def test_without_validation_there_is_no_best(tmp_path: Path) -> None:
    result = run(tmp_path / "run", Watch(), validation=None)
    assert (result.best_epoch, result.best_validation_loss) == (None, None)
    assert [record.validation_loss for record in result.epochs] == [None] * 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "last", "run.json", "state"]


@pytest.mark.usefixtures("ctrl_c")
def test_the_second_ctrl_c_ends_the_run_at_once(tmp_path: Path) -> None:
    def interrupt(_: StepRecord) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(pipeline(), TRAIN, VALIDATION, tmp_path / "run", on_step=interrupt)
    assert int(state_of(tmp_path / "run")["step"]) == 0


@pytest.mark.parametrize(
    ("train", "validation", "settings", "message"),
    [
        (TRAIN.select([]), VALIDATION, {}, "the training corpus is empty"),
        (samples(4, classes=2), VALIDATION, {}, "training samples were read with num_classes 2, the settings say 3"),
        (TRAIN, samples(4, classes=2), {}, "validation samples were read with num_classes 2"),
        (replace(TRAIN, multi_label=True), None, {}, "training samples were read with multi_label True"),
        (samples(1), None, {"class_weights": "balanced"}, "class . has no sample"),
        (samples(4), None, {"epochs": 1}, "one step, in the warm-up's rate of 0: it would learn nothing; .*warmup_fraction 0"),
    ],
)
def test_samples_must_fit_the_settings(
    tmp_path: Path, train: Samples, validation: Samples | None, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(pipeline(**settings), train, validation, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
