"""Corpora and samples: what is refused, and the order and split that a continued run depends on."""

from pathlib import Path

import pytest

from blackswan.impl.corpus import Sample, load_corpus
from blackswan.impl.samples import Samples, effective_batches, epoch_order, split_validation, tokenize
from blackswan.impl.tokens import ByteTokens


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a"}', "expected 'input' and either"),
        ('{"input": "a", "label": 1, "labels": [1, 0, 0]}', "expected 'input' and either"),
        ('{"input": "a", "label": 3}', "label is 3; expected an integer from 0 to 2"),
        ('{"input": "a", "label": 1.0}', "label is 1.0"),
        ('{"input": "a", "label": NaN}', "NaN is no JSON number"),
        ('{"input": "\\ud800", "label": 1}', "surrogates not allowed"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"input": "ls", "label": 0}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"corpus\.jsonl:2: .*{message}"):
        load_corpus(tmp_path / "corpus.jsonl", 3)


def test_values_that_no_sample_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 2: the label is \(0, 1\); expected an integer"):
        tokenize([Sample("a", 0), Sample("b", (0, 1))], ByteTokens(4), 2)
    with pytest.raises(ValueError, match="sample 1: the label is 0; expected a tuple of 2 entries"):
        tokenize([Sample("a", 0)], ByteTokens(4), 2, multi_label=True)
    with pytest.raises(ValueError, match="max_seq_len is 0"):
        ByteTokens(0)
    with pytest.raises(ValueError, match="padding_side is 'top'"):
        ByteTokens(3, "top")
    with pytest.raises(ValueError, match="the batch is empty"):
        samples_of(0, 1).batch([], ByteTokens(8))
    with pytest.raises(ValueError, match="the effective batch is 0"):
        effective_batches([1], 0)


def samples_of(*targets: int | tuple[int, ...], classes: int = 3) -> Samples:
    """Samples whose only token is their place."""
    return Samples(tuple((index,) for index in range(len(targets))), targets, classes, bool(targets) and isinstance(targets[0], tuple))


def test_statistics_without_lengths_of_the_texts_take_those_of_the_rows() -> None:
    statistics = Samples(((1, 2), (3,)), (0, 0), 2).statistics()
    assert (statistics.max_length, statistics.truncated, statistics.minority, statistics.imbalance) == (2, 0, 0, float("inf"))


def test_an_order_is_the_same_in_every_version_and_process() -> None:
    """The order is written down here, because a run may be resumed by another version of NumPy."""
    assert epoch_order(10, 0, 0) == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]
    assert epoch_order(10, 7, 2) == [5, 1, 4, 8, 6, 7, 3, 0, 9, 2]


def test_order_and_split_draw_from_different_streams() -> None:
    """Otherwise the first samples of every first epoch would be those that are held out."""
    _, held_out = split_validation(samples_of(*[0] * 100), 0.2, seed=3)
    assert {row[0] for row in held_out.rows} != set(epoch_order(100, 3, 0)[:20])


def test_combinations_of_classes_are_stratified_too() -> None:
    _, validation = split_validation(samples_of(*[(1, 0)] * 40, *[(1, 1)] * 20, *[(0, 0)] * 20, classes=2), 0.25, seed=5)
    assert sorted(validation.targets) == [(0, 0)] * 5 + [(1, 0)] * 10 + [(1, 1)] * 5
    training, validation = split_validation(samples_of((0, 0), (0, 1), (1, 0), (1, 1), classes=2), 0.5, seed=5)
    assert (len(training), len(validation)) == (2, 2)


def test_the_last_sample_of_each_of_several_classes_is_trained_on() -> None:
    for seed in range(20):
        training, validation = split_validation(samples_of(0, 0, 1, 2), 0.5, seed)
        assert (validation.targets, set(training.targets)) == ((0,), {0, 1, 2})


def test_there_is_no_validation_part_where_none_is_asked_for() -> None:
    training, validation = split_validation(samples_of(0, 1), 0.0, seed=0)
    assert (len(training), len(validation)) == (2, 0)
    with pytest.raises(ValueError, match="leave none for validation; give a validation corpus"):
        split_validation(samples_of(), 0.5, seed=0)
