"""transformers' Trainer as a subject: whole runs hold, the multiplied loss of accumulation is found, what it cannot do is lacking."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from falsifiers_claims import CLAIMS

from blackswan import reference
from blackswan.falsifiers.diagnosis.blame import diagnose
from blackswan.falsifiers.diagnosis.run_failures import not_averaged
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.runner.campaign import Selection
from blackswan.falsifiers.runner.engine import Options, falsify
from blackswan.falsifiers.runner.verdict import State
from blackswan.falsifiers.runner.vet import campaign_of
from blackswan.falsifiers.runner.vet import main as vet
from blackswan.falsifiers.subjects.doors.training import Corpus, Plan, Problem
from blackswan.falsifiers.subjects.libraries import trainer
from blackswan.falsifiers.subjects.libraries.trainer import TrainingRuns
from blackswan.falsifiers.subjects.libraries.transformers import TRAINER, TRAINER_ONE_BATCH
from blackswan.falsifiers.subjects.protocol import Lacks, Subject
from blackswan.falsifiers.system.run_problem import small_run
from blackswan.falsifiers.system.trial import Trial

SEVERAL_LABELS = 17
"""A seed whose run pools the last token; in TRN-RUN-STEPS its samples have several labels, and its steps a limit and a decay."""

OTHER, UNTIED = 77, 79
"""Two more, whose runs pool the last token too; in TRN-BEST-CHECKPOINT the epochs of the second one do not tie."""


def trial(claim: str, subject: Subject, seed: int = SEVERAL_LABELS) -> Trial:
    return Trial(Attack(CLAIMS[claim], subject, "float32"), seed)


def wrong(claim: str, subject: Subject, seed: int = SEVERAL_LABELS) -> list[Comparison]:
    return [one for one in trial(claim, subject, seed).run() if not one.held]


def class_weights() -> int:
    """A seed whose run pools the last token and whose samples have one label, with class weights."""
    asked = trial("TRN-RUN-STEPS", TRAINER())
    return next(seed for seed in range(0, 100, 2) if _pooling(asked, seed) == "last")


def _pooling(asked: Trial, seed: int) -> str:
    return str(small_run(Trial(asked.attack, seed)).settings["pooling"])


@pytest.mark.parametrize("claim", ["TRN-RUN-STEPS", "TRN-EPOCHS", "TRN-SCHEDULE", "TRN-BEST-CHECKPOINT", "TRN-EARLY-STOP"])
def test_runs_without_accumulation_hold(claim: str) -> None:
    assert wrong(claim, TRAINER_ONE_BATCH()) == []


def test_a_weighted_loss_of_the_documented_form_holds_with_accumulation() -> None:
    assert wrong("TRN-RUN-STEPS", TRAINER(), class_weights()) == []


def test_accumulation_multiplies_loss_and_norm_and_is_named() -> None:
    found = wrong("TRN-RUN-STEPS", TRAINER())
    assert {one.tensor.partition(", ")[2] for one in found} == {"loss", "norm"}
    assert all(one.actual == pytest.approx(2 * one.expected, rel=1e-5) for one in found)
    culprit = diagnose(CLAIMS["TRN-RUN-STEPS"], Case("", "float32", {}, {}, SEVERAL_LABELS, "normal", {}), found[0], TRAINER())
    assert culprit is not None
    assert culprit.operation == "accumulation of micro-batches"
    assert "is 2.0000 times what is expected, and a step has 2 micro-batches" in culprit.explanation
    assert not_averaged(replace(found[0], tensor="steps made")) is None, "twice as many steps are another fault"


def _arguments(**changes: Any) -> Callable[[Any], None]:
    def change(given: Any) -> None:
        for name, value in changes.items():
            setattr(given, name, value)

    return change


@pytest.mark.parametrize(
    ("claim", "change", "tensor"),
    [
        ("TRN-RUN-STEPS", _arguments(weight_decay=0.0), "step 2, score.weight"),
        ("TRN-RUN-STEPS", _arguments(max_grad_norm=0.0), "step 1, first moment"),
        ("TRN-RUN-STEPS", _arguments(adam_beta2=0.99), "step 1, root of the second moment"),
        ("TRN-EPOCHS", _arguments(dataloader_drop_last=True), "epoch 1, samples"),
        ("TRN-SCHEDULE", _arguments(warmup_steps=0), "learning rate of each step"),
        ("TRN-BEST-CHECKPOINT", _arguments(greater_is_better=True), "result, best epoch"),
    ],
)
def test_a_wrong_setting_is_found(claim: str, change: Callable[[Any], None], tensor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer._arguments

    def changed(*given: Any) -> Any:
        arguments = made(*given)
        change(arguments)
        return arguments

    monkeypatch.setattr(trainer, "_arguments", changed)
    seed = UNTIED if claim == "TRN-BEST-CHECKPOINT" else OTHER
    assert tensor in [one.tensor for one in wrong(claim, TRAINER_ONE_BATCH(), seed)]


class DecaysAll(TRAINER_ONE_BATCH):
    """Says that its biases decay."""

    def declares(self, operation: str) -> dict[str, str]:
        """Nothing."""
        del operation
        return {}


def test_biases_that_do_not_decay_are_declared() -> None:
    found = {one.tensor.partition(", ")[2] for one in wrong("TRN-RUN-STEPS", DecaysAll())}
    assert found == {"score.bias"}


@pytest.mark.parametrize("operation", ["train_steps", "multi_label_steps"])
def test_the_reference_follows_the_declared_decay(operation: str) -> None:
    drawn = small_run(trial("TRN-RUN-STEPS", TRAINER()), multi_label=operation == "multi_label_steps")
    scalars = {**drawn.scalars, "steps": 1, "batch": 2, "micro": 2, "weight_decay": 0.5, "learning_rate": 0.1}
    inputs = drawn.inputs({}, drawn.training.samples()[:2])
    tables = (reference.TABLE, reference.table_of({operation: {"decay": "weights"}}))
    both = [reference.evaluate(operation, inputs, scalars, table) for table in tables]
    for name in drawn.names:
        difference = both[1][f"trainable/{name}"] - both[0][f"trainable/{name}"]
        decayed = 0.05 * drawn.parameters[name] if name == "score.bias" else np.zeros(difference.shape)
        assert difference == pytest.approx(decayed, abs=1e-12)


def test_a_run_goes_on_with_nan_and_counts_the_last_step_as_a_whole_one() -> None:
    assert next(one.tensor for one in wrong("TRN-NON-FINITE", TRAINER_ONE_BATCH(), 12)) == "steps made"
    found = wrong("TRN-VALIDATION-LOSS", TRAINER_ONE_BATCH())
    assert [one.tensor for one in found] == ["epoch 1, training loss", "epoch 2, training loss", "one sample, epoch 1, training loss"]


def problem(**settings: Any) -> Problem:
    drawn = small_run(trial("TRN-RUN-STEPS", TRAINER()), **settings)
    return Problem(drawn.architecture, drawn.parameters, drawn.settings, drawn.training, drawn.validation)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "mean"}, "no pooling mean"),
        ({"dtype": "bfloat16"}, "no dtype bfloat16"),
        ({"backend": "fused"}, "no backend fused"),
        ({"warmup_fraction": 1.0}, "takes a warm-up of 1 for one step"),
        ({"max_seq_len": 1}, "one has . tokens, and max_seq_len is 1"),
        ({"log_interval": 3}, "no counterpart of log_interval"),
    ],
)
def test_settings_that_it_lacks_are_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(Lacks, match=message):
        TrainingRuns(True, torch.device("cpu")).fit(problem(**settings), tmp_path, Plan())


@pytest.mark.parametrize("plan", [Plan(processes=1), Plan(resume=True), Plan(save_every=1), Plan(stop_after=1), Plan(next_rate=0.5)])
def test_runs_that_are_not_whole_are_lacking(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(Lacks, match="not killed, continued or saved within an epoch"):
        TrainingRuns(True, torch.device("cpu")).fit(problem(), tmp_path, plan)


def test_padding_on_either_side_is_what_the_samples_say() -> None:
    for side, expected in (("right", [[7, 8, 9], [7, 256, 256]]), ("left", [[7, 8, 9], [256, 256, 7]])):
        collate = trainer._collate(256, {"padding_side": side, "multi_label": False})
        assert collate(trainer._rows(Corpus([[7, 8, 9], [7]], [0, 1])))["input_ids"].tolist() == expected


def test_vet_asks_it_in_its_own_process_and_says_what_it_lacks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    claims = ("TRN-RUN-STEPS", "TRN-BEST-CHECKPOINT", "TRN-SCORES", "TRN-KILLED-AND-CONTINUED", "DP-SHARDS", "DATA-SPLIT-APART")
    asked = [word for claim in claims for word in ("--claim", claim)]
    assert vet(["transformers:TRAINER", *asked, "-n", "2", "--verdicts", str(tmp_path / "v.jsonl")]) == 1
    said = capsys.readouterr().out
    for line in ("FALSIFIED  TRN-RUN-STEPS", "HELD       TRN-BEST-CHECKPOINT", "NOT_RUN    TRN-SCORES", "NOT_RUN    DATA-SPLIT-APART"):
        assert line in said
    assert "transformers' Trainer makes whole runs" in said
    assert "culprit    accumulation of micro-batches" in said


def test_a_trainer_is_asked_no_operations() -> None:
    with pytest.raises(ValueError, match="has no operation"):
        campaign_of(TRAINER(), Selection(["OP-RMSNORM"]), Options())


class Picky(TRAINER_ONE_BATCH):
    """Counts the problems, and lacks all but some of them."""

    asked = 0

    def door(self, name: str) -> Any:
        """Answers every third question."""
        Picky.asked += 1
        if Picky.asked % self.answers:
            raise Lacks("it would rather not")
        return super().door(name)

    answers = 3


def test_problems_that_a_subject_lacks_are_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainer.ALONE, "pooling", ("last", "mean"))
    found = falsify(CLAIMS["TRN-SCHEDULE"], "float32", Picky(), Options(examples=2))
    assert (found.state, found.tally.run, Picky.asked) == (State.HELD, 2, 2 + found.tally.lacking)
    assert "cases were not asked" in str(found.reason)
    monkeypatch.setattr(Picky, "answers", 10**9)
    monkeypatch.setattr(Picky, "asked", 0)
    found = falsify(CLAIMS["TRN-SCHEDULE"], "float32", Picky(), Options(examples=2))
    assert (found.state, found.reason, Picky.asked) == (State.NOT_RUN, "it would rather not", 8)
