"""Corpora and samples: what is refused, and the order and split that a continued run depends on."""

import io
import resource
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.corpus_memory import peak_of
from blackswan.impl.corpus import Sample, load_corpus, read_corpus
from blackswan.impl.progress import reading
from blackswan.impl.samples import Samples, effective_batches, epoch_order, read_samples, split_validation, tokenize
from blackswan.impl.tokens import ByteTokens


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a"}', "expected 'input' and either"),
        ('{"input": "a", "label": 1, "labels": [1, 0, 0]}', "expected 'input' and either"),
        (f'{{"input": "a", "label": {10**30}}}', "label is 1000000000000000000000000000000"),
        (f'{{"input": "a", "label": {list(range(10**4))}}}', r"label is \[0, 1, 2, 3, 4, 5, \.\.\.\]"),
        ('{"input": "a", "label": 1} {}', "Extra data"),
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
    return Samples.of([(index,) for index in range(len(targets))], targets, classes, bool(targets) and isinstance(targets[0], tuple))


def test_statistics_without_lengths_of_the_texts_take_those_of_the_rows() -> None:
    statistics = replace(Samples.of(((1, 2), (3,)), (0, 0), 2), text_lengths=None).statistics()
    assert (statistics.max_length, statistics.truncated, statistics.minority, statistics.imbalance) == (2, 0, 0, float("inf"))


def test_an_order_is_the_same_in_every_version_and_process() -> None:
    """The order is written down here, because a run may be resumed by another version of NumPy."""
    assert epoch_order(10, 0, 0).tolist() == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]
    assert epoch_order(10, 7, 2).tolist() == [5, 1, 4, 8, 6, 7, 3, 0, 9, 2]


def test_order_and_split_draw_from_different_streams() -> None:
    """Otherwise the first samples of every first epoch would be those that are held out."""
    _, held_out = split_validation(samples_of(*[0] * 100), 0.2, seed=3)
    assert {row[0] for row in held_out.rows} != set(epoch_order(100, 3, 0)[:20].tolist())


def test_combinations_of_classes_are_stratified_too() -> None:
    _, validation = split_validation(samples_of(*[(1, 0)] * 40, *[(1, 1)] * 20, *[(0, 0)] * 20, classes=2), 0.25, seed=5)
    assert sorted(validation.targets.tolist()) == [[0, 0]] * 5 + [[1, 0]] * 10 + [[1, 1]] * 5
    training, validation = split_validation(samples_of((0, 0), (0, 1), (1, 0), (1, 1), classes=2), 0.5, seed=5)
    assert (len(training), len(validation)) == (2, 2)


def test_the_last_sample_of_each_of_several_classes_is_trained_on() -> None:
    for seed in range(20):
        training, validation = split_validation(samples_of(0, 0, 1, 2), 0.5, seed)
        assert (validation.targets.tolist(), set(training.targets.tolist())) == ([0], {0, 1, 2})


def test_no_line_of_a_corpus_is_kept_as_an_object() -> None:
    """A text and a tuple of tokens for each line would take more than twice as much."""
    assert peak_of(20_000, ByteTokens(16)) < 4_000_000


def test_a_corpus_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"input": "a", "label": 0}\n' * 2)
    samples = read_corpus(path, 1)
    next(samples)
    with path.open("a") as file:
        file.write('{"input": "b", "label": 0}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl: changed while it was read"):
        list(samples)


def test_a_full_disk_names_the_folder_of_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"input": "aaaaaaaa", "label": 0}\n' * 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"File too large for the tokens of .*corpus\.jsonl; make room, .* TMPDIR: '{tmp_path}'"):
            read_samples(tmp_path / "corpus.jsonl", ByteTokens(8), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_reading_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter((0.0, 5.0, 12.0, 12.0, 15.0))
    monkeypatch.setattr("time.monotonic", lambda: next(seconds))
    stream = io.StringIO()
    tell = reading(Path("corpus.jsonl"), stream)
    for count in (1000, 2000, 3000):
        tell(count)
    assert stream.getvalue() == "corpus.jsonl: 2,000 samples read\n"
