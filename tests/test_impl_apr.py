"""`.apr` files beside other people's code, and as the model of every command. contracts/apr-v1.yaml asks whether they are read rightly."""

import hashlib
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric import apr_format
from blackswan.falsifiers.numeric.apr_format import Image, plain
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.impl.__main__ import main
from blackswan.impl.apr import open_apr
from blackswan.impl.apr_dtypes import DTYPES, decoded
from blackswan.impl.checkpoint import load_checkpoint, save_checkpoint
from blackswan.impl.config import ClassifyConfig, DecoderConfig
from blackswan.impl.decoder import random_tensors
from blackswan.impl.pipeline import ClassifyPipeline

TINY = DecoderConfig("llama", 1024, 16, 24, 1, 2, 1, 8, 1e-6, 1e4, False, 128)
SETTINGS = ("--num-classes", "2", "--lora-rank", "2", "--max-seq-len", "32", "--batch-size", "4", "--no-quantize-nf4", "--epochs", "1")
PUBLISHED = b"".join(
    (
        bytes.fromhex("41505200 02000004 02000000 4000000000000000 bd000000 0001000000000000 8001000000000000 028cc03b"),
        bytes(20),
        b'{"model_type":"linear_regression","name":"golden-v2","license":null,"data_source":null,"data_license":null,',
        b'"version":"0.0.0-golden","created_at":"1700000000","total_size":0,"param_count":8}' + bytes(3),
        bytes.fromhex("0400 62696173 00 01 0100000000000000 0000000000000000 0400000000000000"),
        bytes.fromhex("0700 77656967687473 00 01 0800000000000000 4000000000000000 2000000000000000") + bytes(61),
        bytes.fromhex("0000003e") + bytes(60),
        bytes.fromhex("0000803f 00000040 0000003f 000000bf 00008040 000000c0 0000803e 00000041") + bytes(32),
        bytes.fromhex("353f0f55"),
    )
)
"""The example of the format's own tests (aprender, crates/apr-format/tests/golden_fixtures.rs)."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model's folder, the same model as a file, and a corpus."""
    monkeypatch.chdir(tmp_path)
    save_checkpoint(tmp_path / "base", TINY, random_tensors(TINY, 0), CHECKPOINT / "tokenizer.json")
    (tmp_path / "base" / "tokenizer_config.json").write_text('{"pad_token": "<eos>"}')
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"input": f"ls {i}", "label": i % 2}) + "\n" for i in range(12)))
    assert main(["export", "--model", "base", "--output", "model.apr"]) == 0
    return tmp_path


def test_the_published_example(tmp_path: Path) -> None:
    assert hashlib.sha256(PUBLISHED).hexdigest() == "047642c8a09f5807466374928c28e370855ddb96f527d4445ee359a591594c2c"
    (tmp_path / "golden.apr").write_bytes(PUBLISHED)
    file = open_apr(tmp_path / "golden.apr")
    file.require_checksum()
    assert {name: (entry.shape, entry.start, entry.size) for name, entry in file.entries.items()} == {
        "bias": ((1,), 384, 4),
        "weights": ((8,), 448, 32),
    }
    assert file.metadata["name"] == "golden-v2"
    with pytest.raises(ValueError, match=r"golden\.apr.*linear_regression"):
        load_checkpoint(tmp_path / "golden.apr")
    _, _, stored = apr_format.read(tmp_path / "golden.apr")
    assert apr_format.array(stored["weights"]).tolist() == [1, 2, 0.5, -0.5, 4, -2, 0.25, 8]


@pytest.mark.parametrize(("code", "halves"), [("Q4_K", (0, 2)), ("Q6_K", (208,))])
def test_blocks_as_ggmls_package_reads_them(code: str, halves: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    _, size = apr_format.BLOCKS[code]
    blocks = rng.integers(0, 256, (500, size), dtype=np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = rng.normal(size=500).astype(np.float16).view(np.uint8).reshape(-1, 2)
    wanted = quants.dequantize(blocks, getattr(gguf.GGMLQuantizationType, code)).astype(np.float32)
    ours = decoded(DTYPES[apr_format.CODES[code]], torch.from_numpy(blocks.reshape(-1).copy()), wanted.shape).numpy()
    for found in (ours, apr_format.decode(code, blocks.tobytes(), wanted.shape)):
        assert (found.view(np.uint32) == wanted.view(np.uint32)).all()


def test_a_run_on_the_file_is_the_run_on_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {}
    for name in ("base", "model.apr"):
        assert main(["train", "--model", name, "--corpus", "corpus.jsonl", "--output", f"{name}-run", *SETTINGS]) == 0
        runs[name] = (folder / f"{name}-run" / "last" / "adapter_model.safetensors").read_bytes()
    assert runs["base"] == runs["model.apr"]
    assert main(["train", "--model", "model.apr", "--corpus", "corpus.jsonl", "--output", "model.apr-run", "--resume", *SETTINGS]) == 0
    capsys.readouterr()
    answers = []
    for name in ("base", "model.apr"):
        assert main(["merge", "--adapter", f"{name}-run", "--output", f"{name}-merged"]) == 0
        capsys.readouterr()
        assert main(["predict", "--model", f"{name}-merged", "", "ls -l"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]
    assert main(["summary", "--model", "model.apr", *SETTINGS, "--memory"]) == 0
    assert "model.apr" in (said := capsys.readouterr().out)
    assert "total at the peak" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export", "--model", "model.apr", "--output", "other.apr"], "other.tokenizer.json exists"),
        (["export", "--model", "nowhere.apr", "--output", "new.apr"], "nowhere.apr: no such file"),
        (["export", "--model", "alone.apr", "--output", "new.apr"], "alone.tokenizer.json: no such file"),
        (["summary", "--model", "alone.apr"], "alone.tokenizer.json: no such file"),
        (["predict", "--model", "model.apr", "ls"], "model.apr: an .apr file is a base model without a head"),
        (["evaluate", "--adapter", "model.apr", "--corpus", "corpus.jsonl"], "an .apr file is a base model without a head"),
    ],
)
def test_bad_input(words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copyfile("model.apr", "alone.apr")
    (folder / "other.tokenizer.json").write_text("{}")
    before = sorted(folder.rglob("*"))
    assert main(words) == 4
    out, err = capsys.readouterr()
    assert (out, said in err) == ("", True), err
    assert sorted(folder.rglob("*")) == before


def test_a_folder_is_no_apr_file(folder: Path) -> None:
    assert ClassifyPipeline.from_apr(folder / "model.apr", ClassifyConfig(max_seq_len=32)).tokens.fill == 1
    with pytest.raises(ValueError, match=r"base: expected a file whose name ends with \.apr"):
        ClassifyPipeline.from_apr(folder / "base", ClassifyConfig(max_seq_len=32))


def test_token_shards_end_documents_as_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--model", str(CHECKPOINT), "--output", str(tmp_path / "model.apr")]) == 0
    for name, model in (("one", CHECKPOINT), ("other", tmp_path / "model.apr")):
        assert main(["tokenize", str(CORPUS_HELDOUT), "--model", str(model), "--output", str(tmp_path / name)]) == 0
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "other"))
    assert one == other
    (tmp_path / "bare.apr").write_bytes(Image({}, []).pack())
    assert main(["tokenize", str(CORPUS_HELDOUT), "--model", str(tmp_path / "bare.apr"), "--output", str(tmp_path / "third")]) == 4
    assert "tokenizer.eos_token_id is None" in capsys.readouterr().err


def test_the_suite_reads_the_file_by_itself(folder: Path) -> None:
    gguf_file = Image(
        json.loads(json.dumps(open_apr(folder / "model.apr").metadata)) | {"rope_type": 0},
        sorted((_renamed(name, tensor.numpy()) for name, tensor in random_tensors(TINY, 0).items()), key=lambda each: each.name),
    )
    (folder / "renamed.apr").write_bytes(gguf_file.pack())
    shutil.copyfile("model.tokenizer.json", "renamed.tokenizer.json")
    inputs = [RealInput(folder / name, folder / "corpus.jsonl") for name in ("base", "model.apr", "renamed.apr")]
    for real in inputs:
        real.check()
        assert real.scalars == inputs[0].scalars
        assert real.rows == inputs[0].rows
        for name in random_tensors(TINY, 0):
            assert (real._parameter(name, "float32") == inputs[0]._parameter(name, "float32")).all()


def _renamed(name: str, value: np.ndarray) -> apr_format.Stored:
    heads = {"q_proj": TINY.heads, "k_proj": TINY.kv_heads}.get(name.split(".")[-2])
    return plain(apr_format.gguf_name(name), apr_format.gguf_rows(value, heads) if heads else value, "F32")
