"""The learning benchmark: its statistics, that it never looks at the held-out split too early, and that README shows what was measured."""

import dataclasses
import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import f1_score

from benchmarks import baselines, learning, paired
from benchmarks.learning import Input, Plan
from falsifiers.data import CHECKPOINT, CORPUS_HELDOUT, CORPUS_TRAIN

ONES = [1] * 40


def answers(right: str) -> list[int]:
    """Class 1 where the text has a `+`: for labels that are all 1, right there."""
    return [int(sign == "+") for sign in right]


def test_macro_f1_is_that_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    for classes in (2, 3, 5):
        truth, guess = (generator.integers(0, classes, 50).tolist() for _ in range(2))
        assert paired.macro_f1(guess, truth, classes) == pytest.approx(f1_score(truth, guess, average="macro"), rel=1e-12)
    assert paired.macro_f1([0, 0, 1, 1], [0, 0, 0, 1], 3) == pytest.approx((4 / 5 + 2 / 3 + 0) / 3)  # a class that does not occur


def test_mcnemar_is_the_binomial_test_of_the_samples_that_differ() -> None:
    first, second = answers("+" * 10 + "-" * 2 + "+" * 20 + "-" * 8), answers("-" * 10 + "+" * 2 + "+" * 20 + "-" * 8)
    found = paired.mcnemar(first, second, ONES)
    assert (found.first_only, found.second_only) == (10, 2)
    assert found.p == pytest.approx(2 * (1 + 12 + 66) / 2**12, rel=1e-12)
    assert found.p == pytest.approx(binomtest(2, 12).pvalue, rel=1e-9)
    assert paired.mcnemar(second, first, ONES) == paired.McNemar(2, 10, found.p)
    assert paired.mcnemar(first, first, ONES).p == 1.0
    assert paired.mcnemar(answers("+-" * 20), answers("-+" * 20), ONES).p == 1.0


def test_the_interval_is_that_of_a_mean() -> None:
    generator = np.random.default_rng(1)
    first, second = generator.integers(0, 2, 400) | generator.integers(0, 2, 400), generator.integers(0, 2, 400)
    found = paired.paired_difference([first.tolist()], second.tolist(), [1] * 400, list(range(400)))
    differences = first - second
    half = 1.96 * differences.std() / 20
    assert found.mean == pytest.approx(differences.mean())
    assert (found.low, found.high) == (pytest.approx(found.mean - half, abs=0.1 * half), pytest.approx(found.mean + half, abs=0.1 * half))


def test_the_permutation_test_counts_exchanges_as_extreme_as_the_observed_one() -> None:
    better, worse = [1, 1, 1], [0, 0, 0]
    assert paired.paired_difference([better], worse, [1, 1, 1], [0, 1, 2]).p == pytest.approx(2 / 8, abs=0.02)
    assert paired.paired_difference([better], worse, [1, 1, 1], [0, 0, 0]).p == 1.0
    assert paired.paired_difference([ONES], [0] * 40, ONES, list(range(40))).p == 1 / 10_001
    assert paired.paired_difference([answers("+-" * 20)], answers("-+" * 20), ONES, list(range(40))).p == 1.0


def test_a_family_counts_once_and_runs_are_no_new_samples() -> None:
    first, second = answers("+" * 8 + "-" * 4), answers("-" * 9 + "+" * 3)
    once = paired.paired_difference([first], second, [1] * 12, list(range(12)))
    thrice = paired.paired_difference([first * 3], second * 3, [1] * 36, list(range(12)) * 3)
    assert dataclasses.astuple(thrice) == pytest.approx(dataclasses.astuple(once))
    assert paired.paired_difference([first] * 3, second, [1] * 12, list(range(12))) == once
    other = paired.paired_difference([first, second], second, [1] * 12, list(range(12)))
    assert other.mean == pytest.approx(once.mean / 2)
    assert paired.paired_difference([first * 3], second * 3, [1] * 36, list(range(36))).p < once.p / 2


def test_without_a_difference_one_test_in_twenty_errs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "RESAMPLES", 1000)
    generator = np.random.default_rng(2)
    groups = [number // 2 for number in range(80)]
    found = []
    for _ in range(200):
        shared = generator.integers(0, 2, (2, 40)).repeat(2, axis=1)  # twins are right or wrong together
        found.append(paired.paired_difference([shared[0].tolist()], shared[1].tolist(), [1] * 80, groups).p)
    assert 0.01 <= np.mean(np.array(found) < 0.05) <= 0.1


def test_families_are_texts_of_the_same_characters() -> None:
    assert paired.families(["ab\ncd", "x", "cd\nab", "ab\ncd\n"]) == [0, 1, 0, 2]
    groups = paired.families(learning.read(CORPUS_HELDOUT)[0])
    assert 300 < len(set(groups)) < 450


def test_the_baseline_is_chosen_by_cross_validation_with_families_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order decides the class here, so only pairs of words can tell; and a text's twin has the other class."""
    monkeypatch.setattr(baselines, "LONGEST", (1, 2))
    monkeypatch.setattr(baselines, "STRENGTHS", (100.0,))
    texts = [text for i in range(30) for text in (f"w{i} first last", f"w{i} last first")]
    labels = [0, 1] * 30
    best, *others = baselines.candidates(texts, labels, paired.families(texts))
    assert (best.longest, best.accuracy) == (2, 1.0)
    assert [choice.accuracy for choice in others] == sorted((choice.accuracy for choice in others), reverse=True)
    assert max(choice.accuracy for choice in others if choice.longest == 1) <= 0.5
    assert baselines.predictions(best, texts, labels, ["new first last", "new last first"]) == [0, 1]
    assert baselines.majority([2, 2, 1], 4) == [2, 2, 2, 2]


class Inline:
    """A pool that works at once, and here."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Input:
    """Sixty scripts to train on, thirty held out, and a short search."""
    for name, source, count in (("train", CORPUS_TRAIN, 60), ("heldout", CORPUS_HELDOUT, 30)):
        (tmp_path / name).write_text("".join(source.read_text().splitlines(keepends=True)[:count]))
    monkeypatch.setattr(learning, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(baselines, "LONGEST", (1,))
    monkeypatch.setattr(baselines, "STRENGTHS", (10.0,))
    return Input(CHECKPOINT, tmp_path / "train", tmp_path / "heldout")


def test_a_small_run_gives_all_of_it(tiny: Input, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    train = learning.trained

    def watched(checkpoint: Path, corpus: Path, questions: Path, settings: dict[str, Any]) -> list[int]:
        asked.append((questions.name, len(learning.read(corpus)[0]) + (len(learning.read(questions)[0]) if corpus != tiny.train else 0)))
        return train(checkpoint, corpus, questions, settings)

    monkeypatch.setattr(learning, "trained", watched)
    results = learning.measure(tiny, Plan(rates=(1e-3, 1e-2), epochs=1, seeds=(3, 4)))
    assert asked == [("part1.jsonl", 60), ("part1.jsonl", 60), ("heldout", 60), ("heldout", 60)]
    best = max(results["rates"], key=lambda trial: trial["accuracy"])
    assert results["settings"]["learning_rate"] == best["learning_rate"]
    assert (results["samples"], [run["seed"] for run in results["runs"]]) == (30, [3, 4])
    assert any(finding.startswith("C-HP-001-RANGE (warn)") for finding in results["findings"])
    assert recomputed(results, tiny) == {key: results[key] for key in ("runs", "baselines", "pooled")}
    text = learning.table(json.loads(json.dumps(results)))
    assert f"| fine-tuned, seed 4 | {results['runs'][1]['accuracy']:.3f} |" in text
    assert "C-HP-001-RANGE (warn): learning_rate" in text


def recomputed(results: dict[str, Any], given: Input) -> dict[str, Any]:
    """Scores and tests from the predictions alone."""
    texts, truth = learning.read(given.heldout)
    digits = {name: [int(digit) for digit in row] for name, row in results["predictions"].items()}
    assert digits["truth"] == truth
    predicted = {run["seed"]: digits[f"seed {run['seed']}"] for run in results["runs"]}
    majority = baselines.majority(learning.read(given.train)[1], len(truth))
    found = json.loads(json.dumps(learning.compare(predicted, digits["tf_idf"], majority, texts, truth)))
    return {key: found[key] for key in ("runs", "baselines", "pooled")}


def test_one_seed_that_is_no_better_or_a_gain_by_chance_is_enough_to_fail() -> None:
    def results(p: float, *counts: tuple[int, int], only: str = "") -> dict[str, Any]:
        names = ("tf_idf", "majority")
        return {
            "runs": [{f"mcnemar_{of}": {"first_only": first, "second_only": second} for of in names} for first, second in counts],
            "pooled": {of: {"p": p if only in ("", of) else 1e-4} for of in names},
        }

    assert learning.beats(results(1e-4, (90, 20), (80, 60)))
    assert not learning.beats(results(1e-4, (90, 20), (50, 50)))
    assert not learning.beats(results(0.02, (90, 20), (80, 60)))
    assert not learning.beats(results(0.02, (90, 20), (80, 60), only="tf_idf"))
    assert not learning.beats(results(0.02, (90, 20), (80, 60), only="majority"))


def test_the_table_replaces_what_stands_between_its_markers() -> None:
    text = f"above\n{learning.BEGIN}\nold\n{learning.END}\nbelow\n"
    assert learning.replaced(text, "new") == text.replace("old", "new")
    for broken in ("above\n", text + text, text.replace(learning.END, "")):
        with pytest.raises(ValueError, match="expected one line"):
            learning.replaced(broken, "new")


def test_readme_shows_what_was_measured_on_what_is_shipped() -> None:
    results = json.loads(learning.RESULTS.read_text())
    assert learning.table(results) in learning.README.read_text()
    assert results["sha256"] == {name: learning._digest(path) for name, path in learning._files(Input()).items()}
    assert recomputed(results, Input()) == {key: results[key] for key in ("runs", "baselines", "pooled")}
    assert results["samples"] >= 500
    assert len(results["runs"]) == 3
    assert learning.beats(results)
