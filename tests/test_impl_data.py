"""Corpus, tokens and device names: what is read and what is refused."""

import json
import math
from pathlib import Path

import pytest
import torch

from blackswan.impl.corpus import Sample, load_corpus, statistics
from blackswan.impl.device import DeviceUnavailable, parse_device, resolve_device
from blackswan.impl.tokens import CheckpointTokens, load_tokenizer

GOOD = '{"input": "ls", "label": 0}\n'


def corpus(folder: Path, text: str | bytes) -> Path:
    path = folder / "corpus.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_reads_single_and_multiple_labels(tmp_path: Path) -> None:
    assert load_corpus(corpus(tmp_path, GOOD + '{"input": "", "label": 2}'), 3) == [Sample("ls", 0), Sample("", 2)]
    both = corpus(tmp_path, GOOD + '{"input": "rm", "labels": [0, 1, 1]}\n')
    assert load_corpus(both, 3, multi_label=True) == [Sample("ls", (1, 0, 0)), Sample("rm", (0, 1, 1))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "Expecting property name"),
        ("", "Expecting value"),
        ("[1]", "expected a JSON object"),
        ('{"input": "a"}', "expected 'input' and either"),
        ('{"input": "a", "lable": 1}', "'lable'"),
        ('{"input": "a", "label": 1, "labels": [1, 0, 0]}', "expected 'input' and either"),
        ('{"input": "a", "label": 1, "label": 2}', "'label' is given twice"),
        ('{"input": 1, "label": 1}', "input is 1; expected a string"),
        ('{"input": "a", "label": 3}', "label is 3; expected an integer from 0 to 2"),
        ('{"input": "a", "label": -1}', "label is -1"),
        ('{"input": "a", "label": true}', "label is True"),
        ('{"input": "a", "label": 1.0}', "label is 1.0"),
        ('{"input": "a", "label": NaN}', "NaN is no JSON number"),
        ('{"input": "\\ud800", "label": 1}', "surrogates not allowed"),
        ('{"input": "a", "labels": [1, 0, 0]}', "one label a sample was asked for"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"corpus\.jsonl:2: .*{message}"):
        load_corpus(corpus(tmp_path, GOOD + line + "\n" + GOOD), 3)


@pytest.mark.parametrize("labels", ["[1, 0]", "[1, 0, 0, 0]", "[1, 0, 2]", "[1, 0, true]", '"101"'])
def test_a_bad_list_of_labels_is_named(tmp_path: Path, labels: str) -> None:
    with pytest.raises(ValueError, match=r":1: labels is .*expected a list of 3 entries"):
        load_corpus(corpus(tmp_path, f'{{"input": "a", "labels": {labels}}}'), 3, multi_label=True)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"corpus\.jsonl:1: .*utf-8"):
        load_corpus(corpus(tmp_path, b'{"input": "\xff", "label": 0}'), 3)


def test_an_empty_or_missing_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the corpus is empty"):
        load_corpus(corpus(tmp_path, ""), 3)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_corpus(tmp_path / "none.jsonl", 3)


def test_statistics() -> None:
    labels = [0] * 98 + [1] * 2
    found = statistics(labels, 3, list(range(1, 101)))
    assert (found.total, found.class_counts, found.minority, found.max_length) == (100, (98, 2, 0), 0, 100)
    assert found.length_percentiles == {50: 50, 90: 90, 95: 95, 99: 99}
    assert statistics([0] * 10, 1, [9, 1, 8, 2, 7, 3, 6, 4, 5, 100]).length_percentiles == {50: 5, 90: 9, 95: 100, 99: 100}
    assert math.isinf(found.imbalance)
    assert statistics(labels, 2, [1] * 100).imbalance == 49.0
    assert statistics([(1, 0, 1)], 3, [1]).class_counts == (1, 0, 1)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["<unk>", "a", "b", "c", "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return tmp_path


@pytest.mark.parametrize(("side", "rows"), [("right", [[1, 2, 3], [2, 4, 4], [4, 4, 4]]), ("left", [[1, 2, 3], [4, 4, 2], [4, 4, 4]])])
def test_batches_are_cut_and_padded(tokenizer_folder: Path, side: str, rows: list[list[int]]) -> None:
    tokens = load_tokenizer(tokenizer_folder, max_seq_len=3, padding_side=side)
    input_ids, mask = tokens.batch(["a b c a b", "b", ""])
    assert input_ids.tolist() == rows
    assert mask.sum(dim=1).tolist() == [3, 1, 1]
    assert mask[1].tolist() == ([True, False, False] if side == "right" else [False, False, True])


def test_a_tokenizer_is_required_and_checked(tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a usable tokenizer"):
        load_tokenizer(tokenizer_folder, 8)
    (tokenizer_folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tokenizer_folder, 8)
    with pytest.raises(ValueError, match="padding_side is 'middle'"):
        CheckpointTokens(tokenizer_folder / "tokenizer.json", 8, "middle")


@pytest.mark.parametrize(
    ("name", "parsed"),
    [("cpu", ("cpu", None)), ("auto", ("auto", None)), ("cuda", ("cuda", None)), ("cuda:0", ("cuda", 0)), ("cuda:15", ("cuda", 15))],
)
def test_device_names(name: str, parsed: tuple[str, int | None]) -> None:
    assert parse_device(name) == parsed


@pytest.mark.parametrize(
    "name", ["", "CPU", "gpu", "cpu:0", "auto:1", "cuda:", "cuda:16", "cuda:-1", "cuda:01", "cuda:1 ", "cuda:٣", "cuda:0\n"]
)
def test_other_device_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected cpu, cuda, cuda:N"):
        resolve_device(name)


def test_only_auto_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="using the CPU") as warned:
        assert resolve_device("auto") == torch.device("cpu")
    assert len(warned) == 1
    for name in ("cuda", "cuda:3"):
        with pytest.raises(DeviceUnavailable, match=f"'{name}': this host has no usable CUDA"):
            resolve_device(name)


def test_an_index_beyond_the_devices_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (resolve_device("cuda:1"), resolve_device("auto")) == (torch.device("cuda:1"), torch.device("cuda:0"))
    with pytest.raises(DeviceUnavailable, match="2 usable"):
        resolve_device("cuda:2")
