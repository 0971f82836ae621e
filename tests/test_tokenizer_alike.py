"""Tokenizers: a text has the tokens that transformers gives it from the same folder, or the folder is refused by its key."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.impl.tokens import load_tokenizer

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pre-tokeniser's pattern of Llama 3; Qwen's has digits one by one."""
PIECES = (
    *("", " ", "  ", "\n", "\r\n", "\t", "a", "A", "Word", "I'll", "CAN'T", "12345", "3.14", "<pad>", "<eos>", "<eos", "<bos>"),
    *("<|endoftext|>", "é", "e\u0301", "ﬁ", "Å", "한국어", "中文。", "🙂", "👩\u200d👩\u200d👧", "\u202e", "\ufeff", "\u0000", "İ", "ß"),
    *("#!/bin/sh", "$((x))", "\u00a0", "…"),
)


def texts() -> list[str]:
    """Each piece by itself, 300 random joins of some, and very long ones."""
    random = np.random.default_rng(0)
    joined = ["".join(random.choice(PIECES, random.integers(1, 12))) for _ in range(300)]
    return [*PIECES, *joined, "word " * 20_000, "x" * 20_000, " " * 5_000]


def shipped(_: dict[str, Any]) -> None:
    """As it is."""


def llama3(tokenizer: dict[str, Any], pattern: str = WORDS) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}


def qwen(tokenizer: dict[str, Any]) -> None:
    llama3(tokenizer, WORDS.replace("{1,3}", ""))
    tokenizer["normalizer"] = {"type": "NFC"}
    tokenizer["added_tokens"][0]["content"] = "<|endoftext|>"
    tokenizer["model"]["vocab"]["<|endoftext|>"] = tokenizer["model"]["vocab"].pop("<pad>")
    tokenizer["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}


def begins_with_a_token(tokenizer: dict[str, Any]) -> None:
    llama3(tokenizer)
    first, text = {"SpecialToken": {"id": "<eos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    token = {"<eos>": {"id": "<eos>", "ids": [1], "tokens": ["<eos>"]}}
    tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text], "special_tokens": token}


def truncates_and_pads(tokenizer: dict[str, Any]) -> None:
    tokenizer["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None}
    tokenizer["padding"] = padding | {"pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>"}


def folder_of(path: Path, family: str, change: Callable[[dict[str, Any]], None], settings: dict[str, Any] | None) -> Path:
    tokenizer = json.loads((CHECKPOINT / "tokenizer.json").read_text())
    change(tokenizer)
    config = json.loads((CHECKPOINT / "config.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "config.json").write_text(json.dumps({**config, "model_type": family}))
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def require_alike(folder: Path, reader: Any) -> None:
    theirs, ours = reader.from_pretrained(folder), load_tokenizer(folder, 10**6)
    for text in texts():
        assert ours.encode(text) == (theirs(text)["input_ids"] or [ours.fill]), repr(text[:80])


@pytest.mark.parametrize(
    ("reader", "family", "change"),
    [
        *((PreTrainedTokenizerFast, "llama", change) for change in (shipped, llama3, qwen, begins_with_a_token, truncates_and_pads)),
        *((AutoTokenizer, "llama", change) for change in (shipped, llama3, begins_with_a_token)),
        *((AutoTokenizer, family, qwen) for family in ("qwen2", "qwen3")),
    ],
)
def test_texts_have_the_tokens_of_transformers(tmp_path: Path, reader: Any, family: str, change: Callable[[dict[str, Any]], None]) -> None:
    require_alike(folder_of(tmp_path, family, change, None), reader)


def test_auto_tokenizer_replaces_what_is_not_qwens_in_a_qwen_folder(tmp_path: Path) -> None:
    """transformers 5 takes only vocabulary and merges there; tokenizer.json is what is read here, as `tokenizers` reads it."""
    folder = folder_of(tmp_path, "qwen2", shipped, None)
    assert AutoTokenizer.from_pretrained(folder)("e\u0301")["input_ids"] != load_tokenizer(folder, 64).encode("e\u0301")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("named", [None, "Qwen2Tokenizer", "PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_a_prefix_is_refused_where_auto_tokenizer_adds_one(tmp_path: Path, family: str, named: str | None) -> None:
    folder = folder_of(tmp_path, family, qwen, {"add_prefix_space": True, **({} if named is None else {"tokenizer_class": named})})
    plain = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids
    adds = AutoTokenizer.from_pretrained(folder)("a")["input_ids"] != plain
    with pytest.raises(ValueError, match="add_prefix_space") if adds else nullcontext():
        assert load_tokenizer(folder, 64).encode("a") == plain


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": True, "bos_token": "<eos>"},
        {"add_bos_token": False, "bos_token": "<eos>"},
        {"add_eos_token": True, "eos_token": "<eos>"},
        {"split_special_tokens": True},
        {"split_special_tokens": False},
        {"pad_token": "<pad>", "eos_token": {"content": "<eos>", "__type": "AddedToken"}},
        {"pad_token": "!"},
        {"bos_token": "<bos>"},
        {"additional_special_tokens": ["<bos>"]},
        {"additional_special_tokens": ["<eos>"]},
        {"extra_special_tokens": ["<bos>"]},
        {"extra_special_tokens": {"image_token": "<bos>"}},
        {"added_tokens_decoder": {"1024": {"content": "<bos>", "special": True}}},
        {"added_tokens_decoder": {"1": {"content": "<eos>", "special": True, "lstrip": True}}},
        {"do_lower_case": True},
        {"clean_up_tokenization_spaces": True},
        {"model_max_length": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("change", [shipped, begins_with_a_token])
def test_a_setting_changes_nothing_or_is_refused_by_its_key(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], settings: dict[str, Any]
) -> None:
    folder = folder_of(tmp_path, "llama", change, {"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    try:
        load_tokenizer(folder, 64)
    except ValueError as error:
        assert str(error).startswith(f"{folder / 'tokenizer_config.json'}: ")  # noqa: PT017
        assert any(key in str(error) for key in settings)  # noqa: PT017
        theirs, plain = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert any(theirs(text)["input_ids"] != plain.encode(text).ids for text in texts()), "refused without need"
        return
    require_alike(folder, PreTrainedTokenizerFast)
    require_alike(folder, AutoTokenizer)
