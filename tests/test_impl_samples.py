"""Tokenised corpora: what they hold, how they are split, ordered and weighted, and what is refused."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.impl.corpus import Sample
from blackswan.impl.samples import Samples, balanced_weights, effective_batches, epoch_order, read_samples, split_validation, tokenize
from blackswan.impl.tokens import ByteTokens, load_tokenizer


def samples_of(*targets: int | tuple[int, ...], classes: int = 3) -> Samples:
    """Samples whose only token is their place."""
    return Samples(tuple((index,) for index in range(len(targets))), targets, classes, bool(targets) and isinstance(targets[0], tuple))


def test_a_corpus_is_read_and_tokenised_once(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"input": "abcdef", "label": 1}\n{"input": "", "label": 0}\n{"input": "é", "labels": [1, 0, 1]}\n')
    found = read_samples(path, ByteTokens(4), 3, multi_label=True)
    assert found.rows == ((97, 98, 99, 100), (256,), (0xC3, 0xA9))
    assert found.targets == ((0, 1, 0), (1, 0, 0), (1, 0, 1))
    assert (len(found), found.lengths(), found.text_lengths) == (3, [4, 1, 2], (6, 1, 2))
    with pytest.raises(ValueError, match=r"corpus\.jsonl:3: labels \(several"):
        read_samples(path, ByteTokens(4), 3)


def test_labels_of_the_other_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 2: the label is \(0, 1\); expected an integer"):
        tokenize([Sample("a", 0), Sample("b", (0, 1))], ByteTokens(4), 2)
    with pytest.raises(ValueError, match="sample 1: the label is 0; expected a tuple of 2 entries"):
        tokenize([Sample("a", 0)], ByteTokens(4), 2, multi_label=True)


def test_statistics_see_the_whole_text() -> None:
    found = tokenize([Sample("x" * length, length % 2) for length in range(1, 101)], ByteTokens(64), 2)
    statistics = found.statistics()
    assert statistics.length_percentiles == {50: 50, 90: 90, 95: 95, 99: 99}
    assert (statistics.max_length, statistics.truncated, statistics.class_counts) == (100, 36, (50, 50))
    assert found.select([99, 0]).statistics().truncated == 1


def test_statistics_without_lengths_of_the_texts_take_those_of_the_rows() -> None:
    statistics = Samples(((1, 2), (3,)), (0, 0), 2).statistics()
    assert (statistics.max_length, statistics.truncated, statistics.minority, statistics.imbalance) == (2, 0, 0, float("inf"))


def test_a_tokenizer_measures_before_truncation_without_its_special_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 2)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = load_tokenizer(tmp_path, 3)
    assert tokens.measure("a b") == ([0, 1, 2], 3)
    assert tokens.measure("a b a b a b a") == ([0, 1, 2], 8)
    assert tokens.measure("") == ([2], 1)
    assert tokens.description == f"{tmp_path / 'tokenizer.json'} (3 tokens)"
    assert load_tokenizer(CHECKPOINT, 1).measure("") == ([0], 1)


def test_byte_tokens_say_what_they_are() -> None:
    tokens = ByteTokens(3, "left")
    assert "bytes" in tokens.description
    assert "random weights" in tokens.description
    input_ids, mask = tokens.batch(["abcd", ""])
    assert input_ids.tolist() == [[97, 98, 99], [256, 256, 256]]
    assert mask.tolist() == [[True, True, True], [False, False, True]]
    assert tokens.vocab == 257
    for arguments, message in (((0,), "max_seq_len is 0"), ((3, "top"), "padding_side is 'top'")):
        with pytest.raises(ValueError, match=message):
            ByteTokens(*arguments)


def test_batches_hold_the_samples_asked_for() -> None:
    found = Samples(((1, 2, 3), (4,), (5, 6)), (2, 0, 1), 3)
    batch = found.batch([1, 2], ByteTokens(8, "left"))
    assert batch.input_ids.tolist() == [[256, 4], [5, 6]]
    assert batch.mask.tolist() == [[False, True], [True, True]]
    assert (batch.labels.tolist(), batch.labels.dtype, batch.input_ids.dtype) == ([0, 1], torch.int64, torch.int64)
    several = samples_of((0, 1), (1, 1), classes=2).batch([1], ByteTokens(8))
    assert (several.labels.tolist(), several.labels.dtype) == ([[1.0, 1.0]], torch.float32)
    with pytest.raises(ValueError, match="the batch is empty"):
        found.batch([], ByteTokens(8))


def test_an_order_is_the_same_in_every_version_and_process() -> None:
    """Written down, because a run may be resumed by another version of NumPy."""
    assert epoch_order(10, 0, 0) == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]
    written = [5, 1, 4, 8, 6, 7, 3, 0, 9, 2]
    assert epoch_order(10, 7, 2) == written


def test_order_and_split_draw_from_different_streams() -> None:
    """Else the first samples of every first epoch would be those held out."""
    _, held_out = split_validation(samples_of(*[0] * 100), 0.2, seed=3)
    assert {row[0] for row in held_out.rows} != set(epoch_order(100, 3, 0)[:20])


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (1, [1]), (4, [4]), (9, [4, 4, 1])])
def test_effective_batches(count: int, sizes: list[int]) -> None:
    batches = effective_batches(range(count), 4)
    assert [len(batch) for batch in batches] == sizes
    assert [index for batch in batches for index in batch] == list(range(count))


def test_an_effective_batch_holds_something() -> None:
    with pytest.raises(ValueError, match="the effective batch is 0"):
        effective_batches([1], 0)


def test_a_split_is_stratified_disjoint_and_complete() -> None:
    training, validation = split_validation(samples_of(*[0] * 50, *[1] * 30, *[2] * 20), 0.1, seed=5)
    assert validation.statistics().class_counts == (5, 3, 2)
    assert training.statistics().class_counts == (45, 27, 18)
    assert sorted([*training.rows, *validation.rows]) == [(index,) for index in range(100)]
    assert list(validation.rows) == sorted(validation.rows), "the corpus's order is kept"


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.29, 0.5, 0.57])
def test_no_class_gives_more_than_its_share_rounded_up(fraction: float) -> None:
    exact = Fraction(str(fraction))
    for counts in ((6, 1), (10, 20, 1), (100, 1), (7, 13, 2), (100, 200, 300, 1, 1)):
        targets = [label for label, count in enumerate(counts) for _ in range(count)]
        _, validation = split_validation(samples_of(*targets, classes=len(counts)), fraction, seed=0)
        for count, taken in zip(counts, validation.statistics().class_counts, strict=True):
            assert math.floor(exact * count) <= taken + (count == 1) or taken == count - 1
            assert taken <= math.ceil(exact * count)
            assert taken < count


def test_combinations_of_classes_are_stratified_too() -> None:
    _, validation = split_validation(samples_of(*[(1, 0)] * 40, *[(1, 1)] * 20, *[(0, 0)] * 20, classes=2), 0.25, seed=5)
    assert sorted(validation.targets) == [(0, 0)] * 5 + [(1, 0)] * 10 + [(1, 1)] * 5
    training, validation = split_validation(samples_of((0, 0), (0, 1), (1, 0), (1, 1), classes=2), 0.5, seed=5)
    assert (len(training), len(validation)) == (2, 2)


def test_the_last_sample_of_a_class_is_trained_on() -> None:
    for seed in range(20):
        training, validation = split_validation(samples_of(0, 0, 1, 2), 0.5, seed)
        assert (validation.targets, set(training.targets)) == ((0,), {0, 1, 2})


def test_no_validation_only_where_none_is_asked_for() -> None:
    training, validation = split_validation(samples_of(0, 1), 0.0, seed=0)
    assert (len(training), len(validation)) == (2, 0)
    for samples in (samples_of(0), samples_of(0, 1, 2), samples_of()):
        with pytest.raises(ValueError, match="leave none for validation; give a validation corpus"):
            split_validation(samples, 0.5, seed=0)
    for fraction in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="validation_fraction is"):
            split_validation(samples_of(0, 0), fraction, seed=0)


def test_balanced_weights() -> None:
    assert balanced_weights(samples_of(0, 0, 0, 1, classes=2)) == pytest.approx((0.5, 1.5), rel=1e-15)
    assert balanced_weights(samples_of((1, 0), (1, 1), (1, 0), classes=2)) == pytest.approx((0.5, 1.5), rel=1e-15)
    with pytest.raises(ValueError, match="class 2 has no sample"):
        balanced_weights(samples_of(0, 1))
