"""Samples that do not fit their run: rows, labels and settings that disagree in each way in which they can."""

import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.doors.training import Corpus, Plan
from blackswan.falsifiers.system.run_problem import ACCUMULATION, PARTS, SIZES, SmallRun, small_run, with_samples
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.trial import Trial

MOST = 10**7
"""Steps of a run: the rate of each is kept."""
MANY = 3000
"""Samples of a corpus that is larger than others."""
TURNS = 50
"""So often others take the place of samples in memory, if the allocator gives it out again at all."""
CALLS = ("accumulate", "train_batch", "evaluate", "forward_only")
ERRORS = "ValueError|OverflowError"


def refuses_samples(trial: Trial) -> Iterator[Comparison]:
    """As training and as validation samples of a run, which writes nothing then but for a token, and by a call of a pipeline that is drawn.

    Those at the bounds are taken: the last class and the first, the last token, as many tokens as there may be, no validation sample.
    """
    rng = trial.rng("calls")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        for several in (False, True):
            problem = small_run(trial, multi_label=several, epochs=1)
            for name, bad, message in _misfits(problem, problem.training):
                told = f"{name}, {'several labels' if several else 'one label'} a sample"
                for part in PARTS:
                    run = partial(trial.trainer.fit, with_samples(problem, part, bad), folder, Plan())
                    number = rf"sample {len(bad.labels)}\b" if name.startswith("a label ") and len(bad.labels) == len(bad.rows) else message
                    yield trial.refuses(f"{told}, {part}", run, number, ERRORS)
                    if "token" not in name:
                        left = sorted(content(folder).keys() - {".lock"}) if folder.exists() else []
                        yield from same(f"files after {told}, {part}", [], left)
                    shutil.rmtree(folder, ignore_errors=True)
                call = str(rng.choice(CALLS))
                yield trial.refuses(f"{told}, {call}", partial(_by_hand, trial, problem, bad, call), message, ERRORS)
            held = trial.trainer.fit(_at_the_bounds(problem), folder, Plan())
            yield from same("steps on samples at the bounds", len(problem.batches), held.result and held.result.steps)
            shutil.rmtree(folder)
            for part in PARTS:
                at, bad = _late_label(problem)
                run = partial(trial.trainer.fit, with_samples(problem, part, bad), folder, Plan())
                yield trial.refuses(f"a bad label of many samples, {part}, {several}", run, rf"sample {at + 1}\b", ERRORS)
        yield from _in_the_place_of_others(trial, problem)
        nothing = replace(small_run(trial, epochs=1), training=Corpus([], []))
        yield trial.refuses("no sample, training", partial(trial.trainer.fit, nothing, folder, Plan()), "empty|no sample", "ValueError")
        size = int(rng.integers(1, 5))  # by which an epoch has more than one step: fewer epochs than MOST are too many
        steps = math.ceil(len(problem.training) / (ACCUMULATION * size))
        long = small_run(trial, epochs=MOST // steps + 1, batch_size=size)
        most = {"epochs": MOST // 4, "batch_size": 2, "accumulation_steps": 3}
        yield from same("the most steps that a run may have", MOST, trial.classifiers.steps_of_a_run(most, 19))
        impatient = replace(small_run(trial, early_stop_patience=1), validation=Corpus([], []))
        for name, misfit, message in (
            ("steps at a rate of 0 alone", small_run(trial, warmup_fraction=1.0, epochs=1, batch_size=16), "warmup"),
            ("more steps than can be made", long, f"epochs is .* {long.settings['epochs'] * steps:,} steps"),
            ("patience without a sample to validate on", impatient, "early_stop_patience"),
        ):
            run = partial(trial.trainer.fit, misfit, folder, Plan(stop_after=1))
            yield trial.refuses(name, run, message, "ValueError")
            yield from same(f"the folder after {name}", False, (folder / "run.json").exists())
        for every in (0, -1, 1.5, True):
            states = partial(trial.trainer.fit, problem, folder, Plan(save_every=every))  # type: ignore[arg-type]
            yield trial.refuses(f"states after {every} steps", states, "save_every", "ValueError")


def _in_the_place_of_others(trial: Trial, problem: SmallRun) -> Iterator[Comparison]:
    """A pipeline refuses a text that is too long also where its samples lie in memory where others lay that fitted."""
    corpus, longest = problem.training, problem.settings["max_seq_len"]
    mixed = Corpus([*corpus.rows, [1] * (longest + 1)], [*corpus.labels, corpus.labels[0]])
    pipeline = trial.trainer.pipeline(replace(problem, training=mixed))
    for turn in range(TURNS):
        pipeline.forward_only([0])
        ask = partial(pipeline.forward_only, [len(corpus.rows)])
        yield trial.refuses(f"a text that is too long after one that fits, in turn {turn}", ask, "max_seq_len", ERRORS)


def _late_label(problem: SmallRun) -> tuple[int, Corpus]:
    """So many samples that they may be looked at in parts, of which the last has a label of no class; its place."""
    rows, labels = ([*given] * (MANY // len(problem.training)) for given in (problem.training.rows, problem.training.labels))
    bad = _bad_labels(problem.classes, several=problem.several)[0 if problem.several else 1]
    return len(labels) - 1, Corpus(rows, [*labels[:-1], bad])


def _by_hand(trial: Trial, problem: SmallRun, bad: Corpus, call: str) -> object:
    return getattr(trial.trainer.pipeline(replace(problem, training=bad)), call)(range(len(bad.rows)))


def _misfits(problem: SmallRun, corpus: Corpus) -> Iterator[tuple[str, Corpus, str]]:
    """Corpora with one thing wrong, by its name, and a word of the refusal."""
    rows, labels, classes = corpus.rows, corpus.labels, problem.classes
    for name, changed in (("a label more", [*labels, labels[0]]), ("a label fewer", labels[:-1]), ("no label", [])):
        yield name, replace(corpus, labels=changed), "label"
    yield "a text fewer", replace(corpus, rows=rows[1:]), "label"
    for label in _bad_labels(classes, several=problem.several):
        # A run names the sample, a call by hand the place in its batch.
        yield f"a label {label}", replace(corpus, labels=[*labels[:-1], label]), rf"sample {len(labels)}\b|(labels|targets)\["
    if problem.several:
        moved: list[Label] = [*labels[:-2], [0] * (classes + 1), [0] * (classes - 1)]
        yield "an entry too many and one too few", replace(corpus, labels=moved), "label"
    longest = problem.settings["max_seq_len"]
    for name, row in {
        "a text of no token": [],
        "a token that the vocabulary does not have": [1, SIZES["vocab"]],
        "a token below 0": [1, -1],
        "a text too long": [1] * (longest + 1),
    }.items():
        yield name, replace(corpus, rows=[*rows[:-1], row]), "token|negative|max_seq_len"
    for setting, value in (("num_classes", classes + 1), ("multi_label", not problem.several)):
        other: list[Label] = [[1] * len(label) if isinstance(label, list) else label for label in labels]
        if setting == "multi_label":
            other = [0 if problem.several else [0] * classes for _ in labels]
        elif problem.several:
            other = [[*label, 0] for label in labels if isinstance(label, list)]
        own = problem.settings[setting]
        told = rf"read.*{setting} {value!r}\b.*settings.*{own!r}\b|settings.*{setting} {own!r}\b.*read.*{value!r}\b"
        yield f"read with {setting} {value}", replace(corpus, labels=other, read_with={setting: value}), told


def _bad_labels(classes: int, *, several: bool) -> list[Label]:
    """Labels beyond the first and the last class, and labels of the other kind."""
    if not several:
        return [-1, classes, -100, [0] * classes, [0]]
    none = [0] * (classes - 1)
    return [[*none, 2], none, [*none, 0, 1], [], 0, 1]


def _at_the_bounds(problem: SmallRun) -> SmallRun:
    rows, labels, classes = problem.training.rows, problem.training.labels, problem.classes
    last: list[Label] = [[0] * classes, [1] * classes] if problem.several else [0, classes - 1]
    whole = [[SIZES["vocab"] - 1] * problem.settings["max_seq_len"], [0]]
    training = Corpus([*rows[:-2], *whole], [*labels[:-2], *last])
    return replace(problem, training=training, validation=Corpus([], []))
