"""The learning benchmark: its statistics, that it never looks at the held-out split too early, and that README shows what was measured."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn.metrics import f1_score

from benchmarks import baselines, learning, learning_choice, learning_table, paired
from benchmarks.learning import Input
from benchmarks.shipped_data.scripts import SEED, Example, make_unseen, normalise
from benchmarks.unseen import UNSEEN_COUNTS, UNSEEN_SEED, require_unseen
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT, CORPUS_TRAIN

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
    """Workers that are this process."""

    @staticmethod
    def answers(tasks: Sequence[Callable[[], Any]], *_: object, **__: object) -> Iterator[Any]:
        return (task() for task in tasks)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Input:
    """Sixty scripts to train on, thirty held out, fifteen of another seed than the benchmark's, and a short search."""
    for name, source, count in (("train", CORPUS_TRAIN, 60), ("heldout", CORPUS_HELDOUT, 30)):
        (tmp_path / name).write_text("".join(source.read_text().splitlines(keepends=True)[:count]))
    for module in (learning, learning_choice):
        monkeypatch.setattr(module, "workers", Inline)
    monkeypatch.setattr(baselines, "LONGEST", (1,))
    monkeypatch.setattr(baselines, "STRENGTHS", (10.0,))
    return Input(CHECKPOINT, tmp_path / "train", tmp_path / "heldout", (3, 3, 3, 3, 3), 1)


def test_a_small_run_chooses_on_training_scripts_alone_and_compares(tiny: Input, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[set[str], list[int]]] = []
    train = learning.trained

    def watched(checkpoint: Path, corpus: Path, questions: list[list[str]], settings: dict[str, Any]) -> list[list[int]]:
        texts = learning.read(corpus)[0]
        asked.append(({*texts, *questions[0]}, [len(texts), *map(len, questions)]))
        return train(checkpoint, corpus, questions, settings)

    for module in (learning, learning_choice):
        monkeypatch.setattr(module, "trained", watched)
    choice = learning_choice.choose(tiny, learning_choice.SETTINGS | {"epochs": 1}, (1e-3, 1e-2), 2)
    assert [texts == set(learning.read(tiny.train)[0]) for texts, _ in asked] == [True, True]
    results = learning.measure(tiny, json.loads(json.dumps(choice)), [3, 4], 2)
    assert [sizes for _, sizes in asked[2:]] == [[60, 15, 30]] * 2
    best = max(choice["rates"], key=lambda trial: trial["accuracy"])
    assert results["settings"]["learning_rate"] == best["learning_rate"]
    assert results["tf_idf"]["accuracy"] == max(found["accuracy"] for found in choice["tf_idf"])
    assert [results[name]["samples"] for name in ("unseen", "heldout")] == [15, 30]
    assert [run["seed"] for run in results["unseen"]["runs"]] == [3, 4]
    assert any(finding.startswith("C-HP-001-RANGE (warn)") for finding in results["findings"])
    assert recomputed(results, tiny) == {name: results[name] for name in ("unseen", "heldout")}
    text = learning_table.table(json.loads(json.dumps(results)))
    assert f"| fine-tuned, seed 4 | {results['unseen']['runs'][1]['accuracy']:.3f} |" in text
    assert "C-HP-001-RANGE (warn): learning_rate" in text


def recomputed(results: dict[str, Any], given: Input) -> dict[str, Any]:
    """Scores and tests from the predictions alone, on scripts that are made again."""
    labels, found = learning.read(given.train)[1], {}
    for name, (texts, truth) in given.questions().items():
        digits = {of: [int(digit) for digit in row] for of, row in results[name]["predictions"].items()}
        assert digits["truth"] == truth
        predicted = {run["seed"]: digits[f"seed {run['seed']}"] for run in results[name]["runs"]}
        found[name] = json.loads(json.dumps(learning.compare(predicted, digits["tf_idf"], labels, texts, truth)))
    return found


def test_unseen_scripts_are_none_of_the_shipped_ones_nor_their_twins() -> None:
    """Compared here as they stand and with blanks made one, not in the way that the generator and the benchmark do it."""
    texts, labels = Input().questions()["unseen"]
    assert (len(texts), [labels.count(index) for index in range(5)]) == (2000, list(UNSEEN_COUNTS))
    known = [text for path in (CORPUS_TRAIN, CORPUS_HELDOUT) for text in learning.read(path)[0]]
    assert not set(texts) & set(known)
    assert not {" ".join(text.split()) for text in texts} & {" ".join(text.split()) for text in known}
    assert len({" ".join(text.split()) for text in texts}) == len(texts)
    assert UNSEEN_SEED != SEED


def test_unseen_scripts_differ_from_known_ones_in_more_than_names_and_numbers() -> None:
    first = [example.text for example in make_unseen((3, 3, 3, 3, 3), 1, [])]
    again, other = ([example.text for example in make_unseen((3, 3, 3, 3, 3), 1, known)] for known in ([], first))
    assert first == again
    assert not {normalise(text) for text in first} & {normalise(text) for text in other}


def test_a_script_that_is_known_or_wrongly_labelled_is_refused() -> None:
    text, label = "mkdir /srv/app/x\n[ -d /srv/app/x ] && exit 0\n", 3
    require_unseen([Example(text, label)], ["uptime\n"])
    for known in (text, text.replace("\n", "  \n"), "".join(reversed(text.splitlines(keepends=True)))):
        with pytest.raises(ValueError, match="known already"):
            require_unseen([Example(text, label)], ["uptime\n", known])
    with pytest.raises(ValueError, match="labelled 0, and its text says 3"):
        require_unseen([Example(text, 0)], [])


def test_holm_multiplies_by_what_is_left_and_never_falls() -> None:
    assert paired.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired.holm([0.9, 0.02]) == pytest.approx([0.9, 0.04])
    assert paired.holm([0.5, 0.6, 0.7]) == [1.0, 1.0, 1.0]
    assert paired.holm([]) == []


def test_one_seed_that_is_no_better_or_better_by_chance_is_enough_to_fail() -> None:
    def compared(*counts: tuple[int, int], p: float = 1e-4, only: tuple[str, str] | None = None) -> dict[str, Any]:
        def values(baseline: str, test: str) -> list[float]:
            return [1e-4, p if only in (None, (baseline, test)) else 1e-4]

        return {
            "against": {
                baseline: {
                    "mcnemar": [{"first_only": first, "second_only": second} for first, second in counts],
                    "holm": {test: values(baseline, test) for test in ("mcnemar", "permutation")},
                }
                for baseline in ("tf_idf", "majority")
            }
        }

    assert learning.beats(compared((90, 20), (80, 60)))
    assert not learning.beats(compared((90, 20), (50, 50)))
    assert not learning.beats(compared((90, 20), (20, 90)))
    assert not learning.beats(compared((90, 20), (80, 60), p=0.02))
    for baseline in ("tf_idf", "majority"):
        for test in ("mcnemar", "permutation"):
            assert not learning.beats(compared((90, 20), (80, 60), p=0.01, only=(baseline, test)))


def test_p_values_are_adjusted_for_the_number_of_seeds() -> None:
    """Twelve samples of a seed that differ, all in its favour, have p = 2⁻¹¹; the other seed is no better than the baseline."""
    good, bad = answers("+" * 32 + "-" * 8), answers("-" * 12 + "+" * 20 + "-" * 8)
    tests = learning.compare({0: good, 1: bad}, bad, ONES, [f"{number:b}" for number in range(2, 42)], ONES)["against"]["tf_idf"]
    assert [test["p"] for test in tests["mcnemar"]] == [2.0**-11, 1.0]
    assert tests["holm"]["mcnemar"] == [2.0**-10, 1.0]
    assert tests["holm"]["permutation"] == [2 * tests["permutation"][0]["p"], 1.0]


def test_a_seed_given_twice_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "measure", lambda *_: pytest.fail("measured before it was refused"))
    with pytest.raises(SystemExit) as ended:
        learning.main(["--seeds", "0", "1", "0"])
    assert ended.value.code == 2
    assert "error: argument --seeds: 0 1 0: expected each seed once" in capsys.readouterr().err


def test_the_table_replaces_what_stands_between_its_markers() -> None:
    text = f"above\n{learning_table.BEGIN}\nold\n{learning_table.END}\nbelow\n"
    assert learning_table.replaced(text, "new") == text.replace("old", "new")
    for broken in ("above\n", text + text, text.replace(learning_table.END, "")):
        with pytest.raises(ValueError, match="expected one line"):
            learning_table.replaced(broken, "new")


def test_the_results_are_of_what_is_shipped() -> None:
    results = json.loads(learning.RESULTS.read_text())
    choice = json.loads(learning.CHOICE.read_text())
    assert (results["settings"], results["rates"]) == (choice["settings"], choice["rates"])
    assert results["sha256"] == Input().digests()
    assert {name: results["sha256"][name] for name in choice["sha256"]} == choice["sha256"]
    assert recomputed(results, Input()) == {name: results[name] for name in ("unseen", "heldout")}
    assert [run["seed"] for run in results["unseen"]["runs"]] == [0, 1, 2]
    assert learning.beats(results["unseen"])


def test_readme_shows_the_results() -> None:
    assert learning_table.table(json.loads(learning.RESULTS.read_text())) in learning.README.read_text()
