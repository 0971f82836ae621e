"""Wrong shards of tokens: how texts become ids, how ids lie on disk, and which of them are refused."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl import strict_json

wrong_steps(
    "impl.token_shards:DTYPES",
    token_ids_signed=("Ids of 16 bits are read with a sign.", lambda dtypes: {**dtypes, "uint16": np.dtype("<i2")}),
)
wrong_steps(
    "impl.token_shards:_open_shard",
    token_ids_up_to_the_vocabulary=(
        "The id after the last one of the vocabulary passes.",
        lambda opened, path, entry, dtype, vocab: opened(path, entry, dtype, vocab + 1),
    ),
)
wrong_steps(
    "impl.token_shards:_checked",
    shards_of_16_bits=(
        "Ids of a large vocabulary lose their upper bits.",
        lambda checked, documents, vocab: ([token % 2**16 for token in ids] for ids in checked(documents, vocab)),
    ),
    tokens_of_one_more=(
        "An id that ends documents may be the one after the last.",
        lambda checked, given, vocab: checked(given, vocab + 1),
    ),
)


@wrong_step("impl.token_shards:tokenize")
def documents_with_added_tokens(_: Any, corpus: Path, tokenizer: Any, end: int) -> Any:
    """What the tokenizer adds to a text for other uses stands in each document."""
    from blackswan.impl.token_shards import _texts

    return ([*tokenizer.encode(text).ids, end] for text in _texts(corpus))


@wrong_step("impl.token_shards:_text")
def documents_of_their_input(text: Any, line: bytes, where: str) -> Any:
    """Of a line with `text` and `input` the latter is the document."""
    value = json.loads(line)
    return value["input"] if "input" in value else text(line, where)


@wrong_step("impl.token_shards:end_token")
def end_token_first_of_several(end_token: Any, model: Path) -> Any:
    """The first of several tokens that end a document, where none was chosen."""
    if model.is_dir() and isinstance(ends := strict_json.loads((model / "config.json").read_bytes()).get("eos_token_id"), list):
        return ends[0]
    return end_token(model)


wrong_steps(
    "impl.token_shards:SPECIAL_TOKENS",
    end_token_by_the_key_of_a_folder=("An .apr file has no token of an end.", lambda said: {key: key for key in said}),
)
wrong_steps(
    "impl.token_shards:whole_folder",
    shards_written_over=("Shards take the place of whatever has that name.", lambda whole, folder: whole(folder, replace=True)),
)
wrong_steps(
    "impl.pretrain_run:sole_writer",
    pretrain_beside_another=("Two processes pre-train into one folder.", lambda *_: nullcontext()),
)


@wrong_step("impl.pretrain_run:_Run.require_usable")
def pretrain_writes_before_it_refuses(require: Any, self: Any, *given: Any) -> None:
    """A folder is made, and something in it, for a run that is refused then."""
    self.output.mkdir(parents=True, exist_ok=True)
    (self.output / ".lock").touch()
    require(self, *given)
