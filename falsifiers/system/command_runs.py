"""Runs by the command `train`: its settings, every number that it writes and prints, kills, workers, and values that are not finite."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from blackswan import reference
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, compare
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.doors.commands import Said
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.doors.training import Kill, Rank
from blackswan.falsifiers.system.adapter_files import ADAPTER_WEIGHTS, BESIDE, WEIGHTS
from blackswan.falsifiers.system.command_problem import (
    CONFIG,
    MAX_SEQ_LEN,
    METRICS,
    ODD,
    RUN,
    STATISTICS,
    Small,
    metrics,
    options,
    reads_files,
    small,
    texts_of,
    tokenizer,
)
from blackswan.falsifiers.system.continued import KILLED
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.stated import QLORA
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.classifier import TARGETS
from blackswan.reference.optimiser import learning_rate_schedule

STANDSTILL = 1e-30
"""A learning rate by which no logit moves: every number of a run is then that of the adapter that it leaves."""
FLOAT64 = 1e-12
"""Sums and quotients in float64 on both sides, relative."""


# Settings


@reads_files
def settings_reach_the_run(trial: Trial) -> list[Comparison]:
    """Each setting, away from its default, arrives bit for bit, given by an option, in a file or by both, of which the option counts.

    It stands in config.yaml, run.json and beside the adapter; what is not given has its default. A run from config.yaml is the same run.
    """
    found: list[Comparison] = []
    for name, away in _away(trial.rng("settings")).items():
        with small(trial, name, {}) as problem:
            found += _reach(trial, name, problem, away)
    return found


def _away(rng: Generator) -> dict[str, dict[str, Any]]:
    """Every setting with another value than its default, in two combinations; numbers that no few digits hold."""
    odd = [float(np.nextafter(value, 1.0)) for value in rng.uniform(0.1, 0.9, 6)]
    common: dict[str, Any] = {
        **{"num_classes": 3, "lora_rank": 3, "lora_alpha": 7 * odd[0], "learning_rate": 2e-5 * odd[1], "epochs": 2, "max_seq_len": 9},
        **{"log_interval": 3, "accumulation_steps": 2, "warmup_fraction": odd[2], "weight_decay": odd[3] / 3, "schedule": "cosine"},
        **{"seed": int(rng.integers(2**53, 2**62)), "padding_side": "left", "backend": "torch", "validation_fraction": 0.3 + odd[4] / 1e4},
    }
    one = {"batch_size": 2, "gradient_clip_norm": odd[5], "class_weights": [1 / 3, 1e-7 * odd[0], math.pi], "quantize_nf4": False}
    two = {"batch_size": 3, "gradient_clip_norm": None, "multi_label": True, "double_quantize": True, "dtype": "bfloat16"}
    return {
        "one label": {**common, **one, "lora_targets": "q_proj,down_proj", "pooling": "last", "early_stop_patience": 2},
        "several labels": {**common, **two, "lora_targets": "all", "pooling": "first", "early_stop_patience": 1},
    }


def _reach(trial: Trial, name: str, problem: Small, away: Mapping[str, Any]) -> Iterator[Comparison]:
    rng = trial.rng(f"ways {name}")
    ways = {setting: str(rng.choice(["option", "file", "both", "default"], p=[0.35, 0.35, 0.2, 0.1])) for setting in away}
    ways |= dict.fromkeys(("num_classes", "epochs", "class_weights", "multi_label", "double_quantize", "lora_alpha"), "option")
    expected = QLORA | {setting: value for setting, value in away.items() if ways[setting] != "default"}
    if ways["lora_rank"] == "file":  # where the rank alone is given, alpha follows it
        expected["lora_alpha"], ways["lora_alpha"] = 2.0 * expected["lora_rank"], "default"
    by_file = {setting: value for setting, value in away.items() if ways[setting] == "file"}
    by_file |= {setting: value for setting, value in QLORA.items() if ways.get(setting) == "both"}
    (problem.folder / "given.yaml").write_text("".join(f"{setting}: {json.dumps(value)}\n" for setting, value in by_file.items()))
    given = options({setting: value for setting, value in away.items() if ways[setting] in ("option", "both")})
    texts = texts_of(rng, 10)
    corpus = problem.corpus("corpus", texts, [index % 2 for index in range(10)])
    where = ["train", f"--model={problem.base}", f"--corpus={corpus}"]
    first, second = problem.folder / "first", problem.folder / "second"
    trial.commands.run(*where, f"--output={first}", f"--config={problem.folder / 'given.yaml'}", *given)
    trial.commands.run(*where, f"--output={second}", f"--config={first / CONFIG}")
    yield from _stated(name, problem, expected, first)
    for file in (CONFIG, STATISTICS, RUN):
        yield from same(f"{file} of a run from config.yaml <{name}>", (first / file).read_text(), (second / file).read_text())
    yield from same(f"metrics of a run from config.yaml <{name}>", metrics(first), metrics(second))
    for part in ("best", "last"):
        tensors = (load_file(run / part / ADAPTER_WEIGHTS) for run in (first, second))
        yield from same(f"{part}/ of a run from config.yaml <{name}>", *tensors)


def _stated(name: str, problem: Small, expected: Mapping[str, Any], run: Path) -> Iterator[Comparison]:
    """The settings in three files."""
    count = sum(value.size for value in problem.model.decoder.values())
    targets = sorted(expected["lora_targets"].split(",") if "," in expected["lora_targets"] else _modules(expected["lora_targets"]))
    written = {key: _plain(value) for key, value in (line.split(": ", 1) for line in (run / CONFIG).read_text().splitlines())}
    written["lora_targets"] = sorted(written.get("lora_targets", []))
    free = {key: value for key, value in expected.items() if key != "log_interval"}
    yield _alike(f"settings in {RUN} <{name}>", free, json.loads((run / RUN).read_text())["settings"])
    yield _alike(f"settings beside last/ <{name}>", expected, json.loads((run / "last" / BESIDE).read_text())["extra"]["settings"])
    yield _alike(f"settings in {CONFIG} <{name}>", {**expected, "lora_targets": targets, "model_params": count}, written)


def _alike(name: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Comparison:
    """All values by their keys, as one comparison."""
    odd = [key for key in sorted(expected.keys() | actual.keys()) if (key, expected.get(key)) != (key, actual.get(key))]
    if not odd:
        return same(name, 0, 0)[0]
    return broken(name, f"other values of {', '.join(odd)}", repr(expected.get(odd[0])), repr(actual.get(odd[0])))


def _modules(targets: str) -> list[str]:
    return [path.rpartition(".")[2] for path in TARGETS[targets]]


def _plain(text: str) -> Any:
    """A value of a YAML file, as a reader of numbers, words and lists of them takes it."""
    if text.startswith("["):
        return [_plain(part) for part in text[1:-1].split(", ")]
    if text in ("null", "true", "false"):
        return json.loads(text)
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|\.inf", text) else text


# Records


@reads_files
def records_are_counted_anew(trial: Trial) -> list[Comparison]:
    """Every number that a run writes and prints about its steps, epochs, samples and model is the one counted here from its files."""
    rng = trial.rng("records")
    found: list[Comparison] = []
    patience, rate = int(rng.integers(1, 3)), float(rng.uniform(0.03, 0.08))
    moving = {"epochs": 6, "early_stop_patience": patience, "learning_rate": rate, "schedule": "cosine", "warmup_fraction": 0.3}
    moving |= {"num_classes": 3, "multi_label": True, "log_interval": 2}
    standing = {"epochs": 2, "learning_rate": STANDSTILL, "batch_size": 4, "accumulation_steps": 3, "validation_fraction": 0.0}
    standing |= {"num_classes": 3, "multi_label": False, "class_weights": rng.uniform(0.5, 2.0, 3).tolist()}
    with small(trial, "moving", moving) as problem:
        texts, labels = texts_of(rng, 13), problem.labels(rng, 13)
        wrong: list[Label] = [[1 - one for one in label] for label in labels[:7] if isinstance(label, list)]
        found += _recorded(trial, "moving", problem, (texts, labels), (texts[:7], wrong), min(6, 1 + patience))
    with small(trial, "standing", standing) as problem:
        texts = texts_of(rng, 7)
        found += _recorded(trial, "one batch", problem, (texts, problem.labels(rng, 7)), None, 2)
    return found


Texts = tuple[list[str], list[Label]]


def _recorded(trial: Trial, name: str, problem: Small, train: Texts, validation: Texts | None, epochs: int) -> Iterator[Comparison]:
    run = problem.folder / "run"
    given = [f"--model={problem.base}", f"--output={run}", f"--corpus={problem.corpus('corpus', *train)}"]
    given += [] if validation is None else [f"--validation={problem.corpus('validation', *validation)}"]
    said = trial.commands.run("train", *given, *options(problem.settings))
    lines = metrics(run)
    yield from _steps(name, problem, len(train[0]), epochs, lines)
    ended = [line for line in lines if line["kind"] == "epoch"]
    yield from _epochs(trial, name, problem, run, validation, ended)
    if problem.settings["learning_rate"] == STANDSTILL:
        yield from _at_standstill(trial, name, problem, run / "last", train, lines)
    yield from _statistics(name, problem, run, train, validation)
    yield from _printed(name, problem, run, said, (train, validation), lines)


def _steps(name: str, problem: Small, samples: int, epochs: int, lines: Sequence[Mapping[str, Any]]) -> Iterator[Comparison]:
    """The order of the lines, and what does not depend on the weights."""
    settings = problem.settings
    size = settings["batch_size"] * settings["accumulation_steps"]
    sizes = [min(size, samples - start) for start in range(0, samples, size)]
    expected: list[tuple[Any, ...]] = []
    for epoch in range(epochs):
        expected += [("step", epoch + 1, epoch * len(sizes) + place + 1, count) for place, count in enumerate(sizes)]
        expected.append(("epoch", epoch + 1, None, None))
    yield from same(f"lines of the metrics <{name}>", expected, [_line(each) for each in lines])
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


def _line(line: Mapping[str, Any]) -> tuple[Any, ...]:
    return (line["kind"], line["epoch"], line.get("step"), line.get("samples"))


def _number(line: Mapping[str, Any]) -> str:
    return f"{line['kind']} {line.get('step', line['epoch'])}"


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
        right = np.mean(((logits > 0) == np.asarray(validation[1])).all(axis=1))
        yield _exact(f"validation_accuracy of {part}/ <{name}>", right, line["validation_accuracy"])


def _at_standstill(
    trial: Trial, name: str, problem: Small, adapter: Path, train: Texts, lines: Sequence[Mapping[str, Any]]
) -> Iterator[Comparison]:
    """A step on the whole corpus, whose weights did not move: loss, accuracy and the gradient's norm."""
    labels, logits = np.asarray(train[1]), problem.logits(adapter, train[0])
    inputs = {**problem.inputs(adapter, train[0]), "labels": labels, "class_weights": np.asarray(problem.settings["class_weights"])}
    found = reference.differentiate("classifier_loss", inputs, problem.model.scalars, {"loss": np.ones(())}, ["trainable"])
    norm = math.sqrt(math.fsum(float(np.sum(np.square(value))) for value in found.values()))
    right = np.mean(logits.argmax(axis=1) == labels)
    for line in (each for each in lines if each["kind"] == "step"):
        yield trial.near(f"loss of a step <{name}>", problem.losses(logits, train[1]).mean(), line["loss"])
        yield trial.near(f"gradient_norm of a step <{name}>", norm, line["gradient_norm"])
        yield _exact(f"accuracy of a step <{name}>", right, line["accuracy"])


def _statistics(name: str, problem: Small, run: Path, train: Texts, validation: Texts | None) -> Iterator[Comparison]:
    lengths = _lengths(train[0])
    labels = np.asarray(train[1])
    counts = labels.sum(axis=0) if problem.several else np.bincount(labels, minlength=problem.classes)
    written = {key: _plain(value) for key, value in (line.split(": ", 1) for line in (run / STATISTICS).read_text().splitlines())}
    expected = {
        "p99_length": lengths[math.ceil(0.99 * len(lengths)) - 1],
        "minority_count": int(counts.min()),
        "sample_count": len(lengths),
    }
    ratio = float(written.pop("imbalance_ratio", math.nan))
    yield from same(f"{STATISTICS} <{name}>", expected, written)
    yield from same(f"imbalance_ratio <{name}>", counts.max() / counts.min() if counts.min() else math.inf, ratio)
    said = json.loads((run / RUN).read_text())
    size = problem.settings["batch_size"] * problem.settings["accumulation_steps"]
    yield from same(f"total_steps in {RUN} <{name}>", problem.settings["epochs"] * math.ceil(len(lengths) / size), said["total_steps"])
    wanted = {"training": len(lengths)} | ({} if validation is None else {"validation": len(validation[0])})
    yield from same(f"samples in {RUN} <{name}>", wanted, {part: each["samples"] for part, each in said["data"].items()})


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
    shown = [line for line in said.out.splitlines() if line.startswith(("samples:", "truncated:", "parameters:")) or " steps, " in line]
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


def _validated(line: Mapping[str, Any]) -> str:
    if line["validation_loss"] is None:
        return ""
    return f"  validation loss {line['validation_loss']:.4f}  accuracy {line['validation_accuracy']:.3f}"


# Kills, workers, values that are not finite


@reads_files
def killed_command_goes_on(trial: Trial, *, kills: int) -> list[Comparison]:
    """A command that is killed at its writes, a line of its metrics torn, and given again with --resume leaves what a whole run does.

    The first kill comes between two states, so that steps are made again; and the state is written after every so many steps.
    """
    rng = trial.rng("kills")
    every = int(rng.integers(2, 4))
    settings = {"multi_label": False, "batch_size": 1, "accumulation_steps": 2, "learning_rate": 0.02, "backend": "torch"}
    with small(trial, "killed", settings) as problem:
        texts = texts_of(rng, 11)
        corpus = problem.corpus("corpus", texts, problem.labels(rng, 11))
        where = [f"--model={problem.base}", f"--corpus={corpus}", f"--save-every={every}", *options(problem.settings)]
        whole, folder = problem.folder / "whole", problem.folder / "killed"
        rank = trial.commands.killed(whole, None, "train", f"--output={whole}", *where)
        if rank.ended:
            return [broken("the whole run", "failed", "its end", rank.ended)]
        found = same("steps between two states", *_between_states(whole, rank, every))
        for kill in (*_kills(rng, rank.events, every, kills), None):
            resume = ["--resume"] if (folder / RUN).is_file() else []
            rank = trial.commands.killed(folder, kill, "train", f"--output={folder}", *resume, *where)
            if rank.ended != (KILLED if kill else ""):
                if rank.ended or kill is None:
                    return [*found, broken("a continued run", "did not go on", "its end", rank.ended)]
                break
            _tear(rng, folder / METRICS)
        found += same("numbers of the lines of the metrics", *(list(map(_number, metrics(each))) for each in (whole, folder)))
        found += same("metrics", metrics(whole), metrics(folder))
        for file in (CONFIG, STATISTICS, RUN):
            found += same(file, (whole / file).read_text(), (folder / file).read_text())
        found += same("state and adapters", *(trial.trainer.kept(each) for each in (whole, folder)))
        left = [sorted(path.name for path in each.iterdir()) for each in (whole, folder)]
    return [*found, *same("files of the run", *left)]


def _between_states(whole: Path, rank: Rank, every: int) -> tuple[list[int], list[int]]:
    """How many steps were made before each state, as they should be and as they were: a line of the metrics is a step's or an epoch's."""
    kinds = [line["kind"] for line in metrics(whole)]
    made, found, expected = 0, [], []
    for event in rank.events:
        if event == f"open {METRICS}":
            made += 1
        elif event.startswith("os.rename state/"):
            found.append(made)
    done, position = [0], 0
    for place, kind in enumerate(kinds, start=1):
        position += kind == "step"
        if kind == "epoch" or position % every == 0:
            done.append(place)
    expected = done
    return expected, found


def _kills(rng: Generator, events: Sequence[str], every: int, count: int) -> list[Kill]:
    """One between two states, the others at random events after the beginning, by their names."""
    first = Kill(f"open {METRICS}", every + int(rng.integers(2, every + 1)))
    names = sorted(
        {name for name in events if not name.startswith(("os.mkdir", f"open {CONFIG}", f"open {STATISTICS}")) and RUN not in name}
    )
    chosen = [str(name) for name in rng.permutation(names)[: count - 1]]
    return [first, *(Kill(name, 1) for name in chosen)]


def _tear(rng: Generator, path: Path) -> None:
    """Cuts a part of the last line off, in half of the cases, as a kill in the middle of its writing does."""
    if path.is_file() and rng.integers(2):
        content = path.read_bytes()
        start = content.rstrip(b"\n").rfind(b"\n") + 1
        path.write_bytes(content[: int(rng.integers(start + 1, len(content)))])


@reads_files
def workers_answer_as_one(trial: Trial) -> list[Comparison]:
    """Two and three workers record and evaluate what one does, in every field, some of them without a sample; only the first one speaks.

    The learning rate moves nothing, so that all numbers are those of the start; the answers are those of every worker.
    """
    found: list[Comparison] = []
    settings = {"learning_rate": STANDSTILL, "batch_size": 2, "backend": "torch"}
    for workers, several in ((3, False), (2, True)):
        with small(trial, f"{workers} workers", settings | {"multi_label": several}) as problem:
            rng = trial.rng(f"corpus of {workers}")
            texts = texts_of(rng, 7)
            labels = problem.labels(rng, 7)
            corpora = [f"--corpus={problem.corpus('corpus', texts, labels)}"]
            corpora.append(f"--validation={problem.corpus('validation', texts[:2], labels[:2])}")
            where = ["train", f"--model={problem.base}", *corpora, *options(problem.settings)]
            one, all_of_them = problem.folder / "one", problem.folder / "several"
            trial.commands.run(*where, f"--output={one}")
            expected = trial.commands.opened(one / "last", texts, labels)
            said, answers = trial.commands.by_workers(workers, all_of_them / "last", texts, labels, *where, f"--output={all_of_them}")
            found += same("what other workers than the first print", [""] * (workers - 1), [each.out for each in said[1:]])
            found += same("lines of the metrics", *([_line(each) for each in metrics(run)] for run in (one, all_of_them)))
            for first, second in zip(metrics(one), metrics(all_of_them), strict=False):
                found += _same_answers(trial, "metrics", first, second)
            for rank, each in enumerate(answers):
                found += _same_answers(trial, f"worker {rank}", vars(expected), vars(each))
    return found


def _same_answers(trial: Trial, name: str, expected: Any, actual: Any) -> Iterator[Comparison]:
    """Numbers that are not whole within the tolerance, all else exactly; lists of numbers at once."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping) and expected.keys() == actual.keys():
        for key in expected:
            yield from _same_answers(trial, f"{name}, {key}", expected[key], actual[key])
    elif isinstance(expected, float | np.ndarray) and isinstance(actual, type(expected)) and np.asarray(expected).dtype.kind == "f":
        yield trial.near(name, np.asarray(expected), np.asarray(actual))
    else:
        yield from same(name, expected, actual)


@reads_files
def non_finite_values_are_errors(trial: Trial) -> list[Comparison]:
    """A text on which the model computes NaN, in the first, a middle or the last batch, ends every command with an error that says so.

    Nothing that is not finite is printed or written, and the library raises an error too.
    """
    found: list[Comparison] = []
    fixed = {"multi_label": False, "lora_targets": "q_v", "quantize_nf4": False, "pooling": "mean", "epochs": 1}
    with small(trial, "non-finite", fixed, "llama") as problem:
        word = _poison(problem)
        rng = trial.rng("non-finite")
        clean = [f"rm {index}" for index in range(7)]
        labels = problem.labels(rng, 7)
        where = [f"--model={problem.base}", *options(problem.settings)]
        corpus, run = problem.corpus("clean", clean, labels), problem.folder / "run"
        trial.commands.run(
            "train", f"--corpus={corpus}", f"--validation={problem.corpus('other', clean, labels)}", f"--output={run}", *where
        )
        for place, at in (("first", 0), ("middle", 4), ("last", 6)):
            texts = [*clean[:at], word, *clean[at + 1 :]]
            bad = problem.corpus(place, texts, labels)
            out = f"--output={problem.folder / place}"
            asked = {
                "predict --corpus": ("predict", f"--adapter={run}", f"--corpus={bad}"),
                "predict TEXT": ("predict", f"--adapter={run}", *texts),
                "evaluate": ("evaluate", f"--adapter={run}", f"--corpus={bad}"),
                "evaluate --json": ("evaluate", f"--adapter={run}", f"--corpus={bad}", "--json"),
                "train, training": ("train", f"--corpus={bad}", f"--validation={corpus}", f"{out} 1", *where),
                "train, validation": ("train", f"--corpus={corpus}", f"--validation={bad}", f"{out} 2", *where),
            }
            for name, arguments in asked.items():
                found += _failed(name, place, trial.commands.attempt(*arguments))
            for path in problem.folder.glob(f"{place} */{METRICS}"):
                found += same(
                    f"numbers in {METRICS} that are not there <{place} batch>",
                    False,
                    bool(re.search("NaN|Infinity|null", path.read_text())),
                )
            for call in ("predict", "probabilities"):
                ask = partial(trial.commands.library, call, run / "last", texts)
                found.append(
                    trial.refuses(f"{call} of the library <{place} batch>", ask, "nan|not finite|non-finite", "FloatingPointError")
                )
    return found


def _failed(name: str, place: str, said: Said) -> Iterator[Comparison]:
    yield from same(f"exit status of {name} <{place} batch>", 1, said.status)
    yield from same(f"numbers that {name} prints <{place} batch>", [], re.findall(r"(?i)\bnan\b|\binf\w*", said.out))
    if not re.search("(?i)nan|not finite|non-finite", said.err):
        yield broken(f"message of {name} <{place} batch>", "does not say why", "a value that is not finite", said.err[-300:])


def _poison(problem: Small) -> str:
    """Makes the scores of attention infinite where a token is, and nowhere else; gives a text that has it.

    It alone has a first component, which the weights of queries and keys multiply by 10²⁰.
    """
    clean = {token for index in range(7) for token in tokenizer().encode(f"rm {index}").ids}
    word = next(text for text in ODD if text and not clean & set(tokenizer().encode(text).ids))
    tensors = load_file(problem.base / WEIGHTS)
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[0] = 0.0
        elif name.endswith(("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")):
            value[0, 0] = 1e20
        elif name.endswith("layers.0.input_layernorm.weight"):
            value[0] = 1.0
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0.0
    embedding[tokenizer().encode(word).ids[0], 0] = 50.0
    save_file(tensors, problem.base / WEIGHTS)
    return word
