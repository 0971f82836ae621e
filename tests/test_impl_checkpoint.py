"""Checkpoints: the same logits as transformers, a bit-exact round trip, and every damaged folder refused whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from blackswan.impl import folder as folders
from blackswan.impl.checkpoint import load_checkpoint, save_checkpoint
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import random_tensors

CONFIG = DecoderConfig("qwen2", 40, 32, 48, 2, 4, 2, 8, 1e-6, 1e6, True, 128)
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model", CONFIG, random_tensors(CONFIG, 3))
    return tmp_path / "model"


def test_saving_refuses_an_existing_folder_and_leaves_nothing_after_a_failure(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="model exists"):
        save_checkpoint(folder, CONFIG, random_tensors(CONFIG, 0))
    with pytest.raises(FileNotFoundError):
        save_checkpoint(tmp_path / "other", CONFIG, random_tensors(CONFIG, 0), tokenizer=tmp_path / "none.json")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_has_its_name_only_when_all_of_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(folders, "flush", lambda path: flushed.append(path.name) if (tmp_path / "new").exists() is False else None)
    save_checkpoint(tmp_path / "new", CONFIG, random_tensors(CONFIG, 0))
    assert {"model.safetensors", "config.json"} <= set(flushed)


def change_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def duplicate_key(folder: Path) -> None:
    """Two entries of one name in the file's header."""
    content = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    entry = b'"' + NAME.encode() + b'":' + json.dumps(json.loads(header)[NAME]).encode()
    twice = header[:-1] + b"," + entry + b"}"
    (folder / "model.safetensors").write_bytes(len(twice).to_bytes(8, "little") + twice + content[8 + length :])


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (duplicate_key, ValueError, "model.safetensors: not a whole safetensors file"),
        (lambda f: shutil.rmtree(f), FileNotFoundError, "model: no such folder"),
    ],
)
def test_refuses_a_damaged_folder(folder: Path, damage: Callable[[Path], None], error: type[Exception], message: str) -> None:
    damage(folder)
    with pytest.raises(error, match=message):
        load_checkpoint(folder)


def test_a_stored_head_that_equals_the_tied_embedding_is_accepted(folder: Path) -> None:
    change_tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(folder)
    assert "lm_head.weight" not in load_checkpoint(folder).tensors
