"""Every number that the command `train` writes and prints, counted anew."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from blackswan import reference
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, compare
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.doors.commands import Said
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.system.adapter_files import ADAPTER_WEIGHTS, TOKENIZER
from blackswan.falsifiers.system.command_problem import (
    CONFIG,
    MAX_SEQ_LEN,
    RUN,
    STANDSTILL,
    STATISTICS,
    Small,
    in_yaml,
    kind_of,
    metrics,
    options,
    small,
    texts_of,
    tokenizer,
)
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, reads_files
from blackswan.reference.classifier import TARGETS
from blackswan.reference.optimiser import learning_rate_schedule
from blackswan.reference.table import Array

LOCK, READABLE = ".lock", 0o444
FLOAT64 = 1e-12
"""Sums and quotients in float64 on both sides, relative."""


@reads_files
def records_are_counted_anew(trial: Trial) -> list[Comparison]:
    """Every number that a run writes and prints about its steps, epochs, samples and model is the one counted here from its files.

    One run learns until its patience ends; two stand still: one on a single batch without validation, one on what a split leaves it.
    """
    rng = trial.rng("records")
    found: list[Comparison] = []
    for name, settings in _runs(rng).items():
        with small(trial, name, {"num_classes": 3, **settings}) as problem:
            texts = texts_of(rng, 13 if name != "one batch" else 7)
            # Of one class there is no sample in one of the runs: the ratio of classes is infinite.
            labels = problem.labels(rng, len(texts), without=1 if name == "one batch" else None)
            if name == "moving":  # the ratio of classes is 7 / 3, whose digits have no end
                labels = np.stack([rng.permutation(len(texts)) < count for count in (7, 3, 5)], axis=1).astype(int).tolist()
            found += _recorded(trial, name, problem, (texts, labels))
    return found


def _runs(rng: Generator) -> dict[str, dict[str, Any]]:
    """The settings of each run."""
    moving = {
        "validation_fraction": 0.0,
        "epochs": 6,
        "early_stop_patience": int(rng.integers(1, 3)),
        "schedule": "cosine",
        "warmup_fraction": 0.3,
    }
    still: dict[str, Any] = {
        "epochs": 11,  # of two digits
        "learning_rate": STANDSTILL,
        "multi_label": False,
    }
    return {
        "moving": {**moving, "learning_rate": float(rng.uniform(0.03, 0.08)), "multi_label": True},
        "one batch": {**still, "batch_size": 1, "accumulation_steps": 12, "validation_fraction": 0.0, "class_weights": [0.5, 2.0, 1.25]},
        "split": {**still, "validation_fraction": 0.25, "class_weights": "balanced"},
        "over classes": {**still, "epochs": 1, "validation_fraction": 0.25, "class_weights": "balanced_over_classes"},
    }


Texts = tuple[list[str], list[Label]]


def _recorded(trial: Trial, name: str, problem: Small, corpus: Texts) -> Iterator[Comparison]:
    run, settings = problem.folder / "run", problem.settings
    given = [f"--model={problem.base}", f"--output={run}", f"--corpus={problem.corpus('corpus', *corpus)}"]
    train, validation = _parts(trial, name, problem, corpus)
    if name == "moving":
        assert validation is not None
        given.append(f"--validation={problem.corpus('validation', *validation)}")
    said = trial.commands.run("train", *given, *options(settings))
    if isinstance(settings["class_weights"], str):
        problem = problem.with_weights_of(train[1])
        yield _exact(f"class weights in {CONFIG} <{name}>", problem.settings["class_weights"], in_yaml(run / CONFIG)["class_weights"])
    lines = metrics(run)
    yield from _steps(name, problem, len(train[0]), lines)
    ended = [line for line in lines if line["kind"] == "epoch"]
    yield from _epochs(trial, name, problem, run, validation, ended)
    if settings["learning_rate"] == STANDSTILL:
        yield from _at_standstill(trial, name, problem, run / "last", train, lines)
    yield from _statistics(name, problem, run, train, validation)
    yield from _printed(name, problem, run, said, (train, validation), lines)
    shown = trial.commands.run("summary", f"--adapter={run}").out
    yield from same(f"summary of the adapter <{name}>", shown.splitlines(), said.out.splitlines()[: len(shown.splitlines())])


def _parts(trial: Trial, name: str, problem: Small, corpus: Texts) -> tuple[Texts, Texts | None]:
    """The texts to train on, and those to validate on: what is right in training is wrong in validation, or what the split holds out."""
    texts, labels = corpus
    if name == "moving":
        wrong: list[Label] = [[1 - one for one in label] for label in labels[-7:] if isinstance(label, list)]
        return corpus, (texts[-7:], wrong)
    if name == "one batch":
        return corpus, None
    found = trial.corpora.split(labels, problem.classes, problem.settings["validation_fraction"], problem.settings["seed"])
    train, held_out = (([texts[at] for at in part], [labels[at] for at in part]) for part in (found.training, found.validation))
    return train, held_out


def _steps(name: str, problem: Small, samples: int, lines: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    """The order of the lines, and what does not depend on the weights."""
    settings = problem.settings
    size = settings["batch_size"] * settings["accumulation_steps"]
    sizes = [min(size, samples - start) for start in range(0, samples, size)]
    losses = [line["validation_loss"] or 0.0 for line in lines if line["kind"] == "epoch"]
    due = [place for place in range(len(losses)) if place - losses.index(min(losses[: place + 1])) == settings["early_stop_patience"]]
    epochs = due[0] + 1 if due else settings["epochs"]
    expected: list[tuple[Any, ...]] = []
    for epoch in range(epochs):
        expected += [("step", epoch + 1, epoch * len(sizes) + place + 1, count) for place, count in enumerate(sizes)]
        expected.append(("epoch", epoch + 1, None, None))
    yield from same(f"lines of the metrics <{name}>", expected, [kind_of(each) for each in lines])
    steps = [line for line in lines if line["kind"] == "step"]
    rates = learning_rate_schedule(
        settings["epochs"] * len(sizes), settings["learning_rate"], settings["warmup_fraction"], settings["schedule"]
    )
    yield _exact(f"learning rates <{name}>", rates[: len(steps)], [line["learning_rate"] for line in steps])
    right = np.asarray([line["accuracy"] * line["samples"] for line in steps])
    yield _exact(f"samples that are right <{name}>", np.round(right), right)
    for line in (each for each in lines if each["kind"] == "epoch"):
        own = [each for each in steps if each["epoch"] == line["epoch"]]
        mean = math.fsum(each["loss"] * each["samples"] for each in own) / sum(each["samples"] for each in own)
        yield _exact(f"train_loss of an epoch <{name}>", mean, line["train_loss"])


def _exact(name: str, expected: Any, actual: Any) -> Comparison:
    wanted = np.asarray(expected, np.float64)
    limit = Errors.flat(FLOAT64 * float(np.abs(wanted).max(initial=0.0)))
    return compare(name, wanted, np.asarray(actual, np.float64), limit, UNIT_ROUNDOFF["float32"])


def _epochs(
    trial: Trial, name: str, problem: Small, run: Path, validation: Texts | None, ended: Sequence[Mapping[str, Any]]
) -> Iterator[Comparison]:
    """Validation of the best and the last epoch, from their adapters; what is called the best so far."""
    if validation is None:
        nothing = [(None, None, False)] * len(ended)
        yield from same(f"validation <{name}>", nothing, [(e["validation_loss"], e["validation_accuracy"], e["best"]) for e in ended])
        yield from same(f"best/ without validation <{name}>", False, (run / "best").exists())
        return
    losses = [line["validation_loss"] for line in ended]
    lowest = [loss < min([math.inf, *losses[:place]]) for place, loss in enumerate(losses)]
    yield from same(f"called the best so far <{name}>", lowest, [line["best"] for line in ended])
    for part, line in (("best", ended[int(np.argmin(losses))]), ("last", ended[-1])):
        logits = problem.logits(run / part, validation[0])
        yield trial.near(f"validation_loss of {part}/ <{name}>", problem.losses(logits, validation[1]).mean(), line["validation_loss"])
        right = _right(problem, logits, validation[1])
        yield _exact(f"validation_accuracy of {part}/ <{name}>", right, line["validation_accuracy"])


def _at_standstill(
    trial: Trial, name: str, problem: Small, adapter: Path, train: Texts, lines: Sequence[Mapping[str, Any]]
) -> Iterator[Comparison]:
    """Where the weights did not move: the loss and the accuracy of an epoch; of a step on the whole corpus the gradient's norm too."""
    labels, logits = np.asarray(train[1]), problem.logits(adapter, train[0])
    inputs = {**problem.inputs(adapter, train[0]), "labels": labels, "class_weights": np.asarray(problem.settings["class_weights"])}
    found = reference.differentiate("classifier_loss", inputs, problem.model.scalars, {"loss": np.ones(())}, ["trainable"])
    norm = math.sqrt(math.fsum(float(np.sum(np.square(value))) for value in found.values()))
    loss = problem.losses(logits, train[1]).mean()
    for line in lines:
        if line["kind"] == "epoch":
            own = [each for each in lines if each["kind"] == "step" and each["epoch"] == line["epoch"]]
            right = sum(each["accuracy"] * each["samples"] for each in own) / len(labels)
            yield trial.near(f"train_loss at a standstill <{name}>", loss, line["train_loss"])
            yield _exact(f"accuracy of the steps of an epoch <{name}>", _right(problem, logits, train[1]), right)
        elif line["samples"] == len(labels):
            yield trial.near(f"loss of a step <{name}>", loss, line["loss"])
            yield trial.near(f"gradient_norm of a step <{name}>", norm, line["gradient_norm"])


def _right(problem: Small, logits: Array, labels: Sequence[Label]) -> float:
    """The share of texts whose labels are all right."""
    wanted = np.asarray(labels)
    return float(np.mean(((logits > 0) == wanted).all(axis=1) if problem.several else logits.argmax(axis=1) == wanted))


def _statistics(name: str, problem: Small, run: Path, train: Texts, validation: Texts | None) -> Iterator[Comparison]:
    lengths = _lengths(train[0])
    labels = np.asarray(train[1])
    counts = labels.sum(axis=0) if problem.several else np.bincount(labels, minlength=problem.classes)
    written = in_yaml(run / STATISTICS)
    expected = {
        "p99_length": lengths[math.ceil(0.99 * len(lengths)) - 1],
        "minority_count": int(counts.min()),
        "sample_count": len(lengths),
    }
    ratio = written.pop("imbalance_ratio", None)
    yield from same(f"{STATISTICS} <{name}>", expected, written)
    yield from same(f"imbalance_ratio <{name}>", counts.max() / counts.min() if counts.min() else math.inf, ratio)
    said = json.loads((run / RUN).read_text())
    size = problem.settings["batch_size"] * problem.settings["accumulation_steps"]
    yield from same(f"total_steps in {RUN} <{name}>", problem.settings["epochs"] * math.ceil(len(lengths) / size), said["total_steps"])
    wanted = {"training": len(lengths)} | ({} if validation is None else {"validation": len(validation[0])})
    yield from same(f"samples in {RUN} <{name}>", wanted, {part: each["samples"] for part, each in said["data"].items()})
    source = [str(problem.base), f"{problem.base / TOKENIZER} ({tokenizer().get_vocab_size()} tokens)"]
    yield from same(f"model and tokens in {RUN} <{name}>", source, [said.get("source_model"), said.get("tokens")])
    os.umask(mask := os.umask(0))
    modes = {str(path.relative_to(run)): path.stat().st_mode for path in run.rglob("*") if path.name != LOCK}
    closed = sorted(name for name, mode in modes.items() if READABLE & ~mask & ~mode)
    yield from same(f"files that others cannot read <{name}>", [], closed)


def _lengths(texts: Sequence[str]) -> list[int]:
    """Tokens of each text before truncation, sorted; an empty one has one."""
    return sorted(max(1, len(tokenizer().encode(text).ids)) for text in texts)


def _printed(
    name: str, problem: Small, run: Path, said: Said, corpora: tuple[Texts, Texts | None], lines: Sequence[Mapping[str, Any]]
) -> Iterator[Comparison]:
    """The lines for people, from the metrics."""
    train, validation = corpora
    cut = sum(length > MAX_SEQ_LEN for length in _lengths(train[0]))
    steps, ended = ([line for line in lines if line["kind"] == kind] for kind in ("step", "epoch"))
    total = json.loads((run / RUN).read_text())["total_steps"]
    expected = [f"samples:    {len(train[0])} to train on, {0 if validation is None else len(validation[0])} for validation"]
    if cut:
        expected.append(f"truncated:  {cut} of the training samples are longer than max_seq_len {MAX_SEQ_LEN}: their end is cut off")
    end = f"{len(steps)} steps, {len(ended)} epochs" + (" (stopped early)" if len(ended) < problem.settings["epochs"] else "")
    if validation is None:
        expected.append(f"{end}; the adapter is {run / 'last'}")
    else:
        best = min(ended, key=lambda line: line["validation_loss"])
        loss = f"(validation loss {best['validation_loss']:.4f})"
        expected.append(f"{end}; the best adapter, of epoch {best['epoch']}, is {run / 'best'} {loss}")
    trained = sum(value.size for value in load_file(run / "last" / ADAPTER_WEIGHTS).values())
    frozen = sum(value.size for key, value in problem.model.decoder.items() if key != "lm_head.weight")
    expected.append(f"parameters: {trained:,} trainable, {frozen:,} frozen")
    expected += _model_lines(problem)
    expected.append(f"rules:      blackswan contracts check {run / CONFIG} --statistics {run / STATISTICS}")
    parts_shown = ("rules:", "samples:", "truncated:", "parameters:", "model:", "tokens:", "LoRA:", "head:")
    shown = [line for line in said.out.splitlines() if line.startswith(parts_shown) or " steps, " in line]
    yield from same(f"lines on standard output <{name}>", sorted(expected), sorted(shown))
    epochs, every = problem.settings["epochs"], problem.settings["log_interval"]
    due = [
        f"epoch {line['epoch']}/{epochs}  step {line['step']}/{total}  loss {line['loss']:.4f}  gradient norm {line['gradient_norm']:.3g}"
        f"  lr {line['learning_rate']:.3g}"
        for line in steps
        if line["step"] % every == 0 or line["step"] == total
    ]
    told = [line for line in said.err.splitlines() if line.startswith("epoch ")]
    yield from same(f"steps shown <{name}>", due, [re.split(r"  [\d.]+ samples/s", line)[0] for line in told if "  step " in line])
    done = [f"epoch {line['epoch']}/{epochs} done  train loss {line['train_loss']:.4f}{_validated(line)}" for line in ended]
    marks = ["  best so far" * line["best"] for line in ended]
    parts = [re.fullmatch(r"(.*?)  [\d.]+ s(  best so far)?", line) for line in told if " done " in line]
    yield from same(f"epochs shown <{name}>", done, [part and part[1] for part in parts])
    yield from same(f"epochs shown as the best so far <{name}>", marks, [part and (part[2] or "") for part in parts])


def _model_lines(problem: Small) -> list[str]:
    """The summary's lines about the model, from its settings and files."""
    settings, scalars = problem.settings, problem.model.scalars
    targets = ", ".join(path.rpartition(".")[2] for path in TARGETS[settings["lora_targets"]])
    kind = f"{problem.base / TOKENIZER} ({tokenizer().get_vocab_size()} tokens)"
    return [
        f"model:      {scalars['family']}, {scalars['layers']} layers, hidden {scalars['hidden']}, {problem.base}",
        f"tokens:     {kind}, at most {MAX_SEQ_LEN}, padded on the {settings['padding_side']}",
        f"LoRA:       rank {settings['lora_rank']}, alpha {settings['lora_alpha']:g}, on {targets}",
        f"head:       {problem.classes} {'labels' if problem.several else 'classes'}, {settings['pooling']} pooling",
    ]


def _validated(line: Mapping[str, Any]) -> str:
    if line["validation_loss"] is None:
        return ""
    return f"  validation loss {line['validation_loss']:.4f}  accuracy {line['validation_accuracy']:.3f}"
