"""Input that asks for more than there is, or that two readers would read differently: refused by name, before memory is taken."""

import json
import resource
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric import case
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.impl import corpus
from blackswan.impl.adapter import load_adapter
from blackswan.impl.checkpoint import load_checkpoint
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.corpus import load_corpus
from blackswan.impl.fit import total_steps
from blackswan.impl.metrics import cut_back
from blackswan.impl.operations.attention import attention
from blackswan.impl.pipeline import ClassifyPipeline

CONFIG = ClassifyConfig(num_classes=5, lora_rank=2, max_seq_len=8)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_layers_that_no_file_holds_are_refused_without_memory(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 10**7, "layer_types": None}))
    before = peak()
    with pytest.raises(ValueError, match=r"config\.json: num_hidden_layers is 10000000, and the files hold \d+ tensors"):
        load_checkpoint(tmp_path / "model")
    assert peak() - before < 2**28


def test_epochs_whose_rates_would_fill_the_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"epochs is 100000000, which makes .* steps"):
        total_steps(replace(CONFIG, epochs=100_000_000), 1000)


def test_a_text_that_attention_has_no_memory_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["blackswan.impl.operations.attention"], "available_memory", lambda: 2.0**32)
    x = torch.zeros(1, 100_000, 1, 2)
    with pytest.raises(MemoryError, match=r"1 texts of 100000 tokens need 74\.5 GiB for attention, and 4\.0 GiB are available"):
        attention(x, x, x, torch.ones(1, 100_000, dtype=torch.bool))


def test_an_eight_bit_adapter_and_a_huge_alpha_are_refused(tmp_path: Path) -> None:
    pipeline = ClassifyPipeline.from_pretrained(CHECKPOINT, CONFIG)
    pipeline.save(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"lora_alpha": 1e308}))
    with pytest.raises(ValueError, match=r"adapter_config\.json: lora_alpha is 1e\+308"):
        load_adapter(tmp_path / "adapter", pipeline.architecture)
    path.write_text(json.dumps(settings))
    eight = {f"base_model.model.{n}": t.to(torch.float8_e4m3fn) for n, t in pipeline.classifier.trainable_parameters().items()}
    save_file(eight, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors: tensor '.*' is stored as torch\.float8_e4m3fn"):
        load_adapter(tmp_path / "adapter", pipeline.architecture)


def test_a_replay_file_of_more_than_there_may_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "MOST_BYTES", 2**20)
    np.savez_compressed(tmp_path / "case.npz", **{"header": np.array(""), "input:x": np.zeros(2**18)})
    with pytest.raises(ValueError, match=r"its arrays take 2,09\d,\d\d\d bytes; expected 1,048,576 at most"):
        case.load(tmp_path / "case.npz")


BAD_LINES = {
    "duplicate key": b'{"input": "ls", "label": 1, "label": 2}',
    "extra key": b'{"input": "ls", "label": 1, "weight": 2}',
    "byte order mark": b'\xef\xbb\xbf{"input": "ls", "label": 1}',
    "UTF-16": '{"input": "ls", "label": 1}'.encode("utf-16"),
    "half a surrogate pair": b'{"input": "\\ud800", "label": 1}',
    "not a number": b'{"input": "ls", "label": NaN}',
    "several labels": b'{"input": "ls", "labels": [0, 1]}',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_falsifiers_and_training_refuse_the_same_corpora_by_file_and_line(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"input": "ls", "label": 0}\n' + line + b"\n")
    for read in (lambda: load_corpus(path, 5), lambda: RealInput(CHECKPOINT, path).check()):
        with pytest.raises(ValueError, match=r"corpus\.jsonl:2: "):
            read()


def test_a_line_that_no_tokenizer_survives_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "LONGEST_LINE", 100)
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"input": "' + 200 * "a" + '", "label": 0}\n')
    with pytest.raises(ValueError, match=r"corpus\.jsonl:1: a line of more than 100 bytes"):
        load_corpus(path, 5)


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"kind": "step", "epoch": 1}'])
def test_a_damaged_line_of_metrics_is_named_and_a_torn_last_one_is_dropped(tmp_path: Path, line: str) -> None:
    path, whole = tmp_path / "metrics.jsonl", '{"kind": "step", "epoch": 1, "step": 1}\n'
    path.write_text(f"{whole}{line}\n{whole}")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: is no line of a run's metrics"):
        cut_back(path, 1, 2)
    path.write_text(f"{whole}{line[:5]}")
    cut_back(path, 1, 2)
    assert path.read_text() == whole
