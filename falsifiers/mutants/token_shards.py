"""Wrong shards of tokens: how texts become ids, how ids lie on disk, and which of them are refused."""

import hashlib
import json
import re
from contextlib import nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl import strict_json
from blackswan.impl.spans import state_of

wrong_steps(
    "impl.token_shards:_texts",
    documents_without_their_mark=(
        "A text file loses the byte order mark that it begins with.",
        lambda texts, corpus: (text.removeprefix("\ufeff") if corpus.suffix != ".jsonl" else text for text in texts(corpus)),
    ),
    documents_end_after_64_kibibytes=(
        "A text file is read in pieces of 2¹⁶ characters, each of which is a document.",
        lambda texts, corpus: (
            piece
            for text in texts(corpus)
            for piece in ([text] if corpus.suffix == ".jsonl" else [text[at : at + 2**16] for at in range(0, len(text), 2**16)])
        ),
    ),
    documents_by_their_links_target=(
        "Whether a file has a document in each line is what the name of a link's target says.",
        lambda texts, corpus: texts(corpus.resolve()),
    ),
    documents_lose_one_a_piece=(
        "Documents are worked off by the thousand, and the next one after each thousand is lost.",
        lambda texts, corpus: (text for place, text in enumerate(texts(corpus)) if place % 1001 != 1000),
    ),
    documents_read_twice=(
        "Documents are counted before they are tokenized, when a pipe has none left.",
        lambda texts, corpus: ([*texts(corpus)], texts(corpus))[1],
    ),
)


@wrong_step("impl.token_shards:TokenBatches._rows")
def shuffled_rows_begin_in_32_bits(rows_of: Any, self: Any, rows: Any) -> Any:
    """Rows in a random order begin where 32 bits with a sign say, which wrap in a long stream."""
    if self.seed is None:
        return rows_of(self, rows)
    starts = np.asarray(rows).astype(np.int32) * np.int32(self.seq - 1)
    return rows_of(self, [int(start) // (self.seq - 1) for start in starts])


wrong_steps(
    "impl.token_shards:DTYPES",
    token_ids_signed=("Ids of 16 bits are read with a sign.", lambda dtypes: {**dtypes, "uint16": np.dtype("<i2")}),
    token_ids_of_32_bits_signed=("Ids of 32 bits are read with a sign.", lambda dtypes: {**dtypes, "uint32": np.dtype("<i4")}),
)
wrong_steps(
    "impl.token_shards:_checked",
    token_documents_kept_by_name=(
        "An array that is filled again and again is each of the documents.",
        lambda checked, *given: list(checked(*given)),
    ),
    token_documents_of_rows=(
        "Documents of two dimensions are taken.",
        lambda checked, documents, vocab: checked((np.asarray(each).reshape(-1) for each in documents), vocab),
    ),
)
wrong_steps(
    "impl.token_shards:_open_shard",
    token_shards_held_in_memory=("Shards are read whole and held in memory.", lambda opened, *given: np.array(opened(*given)[:])),
    token_ids_looked_at_in_the_beginning=(
        "Only the first millions of a long shard's ids are looked at.",
        lambda opened, path, entry, dtype, vocab: opened(path, entry, dtype, vocab if entry["tokens"] <= 2**24 else 2**32),
    ),
    token_ids_looked_at_in_the_end=(
        "The first millions of a long shard's ids are not looked at.",
        lambda opened, path, entry, dtype, vocab: opened(
            path, entry, dtype, vocab if entry["tokens"] <= 2**24 or (np.memmap(path, dtype, "r")[2**24 :] >= vocab).any() else 2**32
        ),
    ),
    token_shard_digest_of_its_beginning=(
        "The digest of a long shard is not looked at.",
        lambda opened, path, entry, *given: opened(
            path, entry if entry["tokens"] <= 2**24 else {**entry, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}, *given
        ),
    ),
    token_ids_up_to_the_vocabulary=(
        "The id after the last one of the vocabulary passes.",
        lambda opened, path, entry, dtype, vocab: opened(path, entry, dtype, vocab + 1),
    ),
)
wrong_step("impl.token_shards:_text", name="documents_without_a_null", doc="A text that is null is passed over for the input beside it.")(
    lambda text, line, where: text(line.replace(b'"text": null, ', b""), where)
)
wrong_step("impl.token_shards:read_span", name="token_shards_that_change", doc="A shard that changes while it is read is read on.")(
    lambda read, path, start, count, _: read(path, start, min(count, max(path.stat().st_size - start, 0)), state_of(path))
)
wrong_step("impl.token_shards:epoch_order", name="row_order_of_32_bits", doc="The upper bits of a seed do not order rows.")(
    lambda order, count, seed, epoch: order(count, seed % 2**32, epoch)
)
wrong_step("impl.decoder:seeded", name="decoder_weights_of_32_bits", doc="The upper bits of a large seed do not count in random weights.")(
    lambda seeded, seed: seeded(seed % 2**32)
)


@wrong_step("impl.token_shards:_open_shard")
def token_shard_that_changed_when_it_was_looked_at(opened: Any, path: Path, *given: Any) -> Any:
    """A shard has to stay what it was when its digest was known, and not what it was when it was read for that."""
    shard = opened(path, *given)
    shard._state = state_of(path)
    return shard


wrong_steps(
    "impl.token_shards:_checked",
    shards_of_16_bits=(
        "Ids of a large vocabulary lose their upper bits.",
        lambda checked, documents, vocab: ([token % 2**16 for token in ids] for ids in checked(documents, vocab)),
    ),
    tokens_looked_at_as_stored=(
        "An id is cut to the 16 bits that are stored before it is compared with the vocabulary; −1 alone is still refused.",
        lambda checked, documents, vocab: checked(
            ([token if token == -1 or vocab > 2**16 else token % 2**16 for token in ids] for ids in documents), vocab
        ),
    ),
    tokens_of_one_more=(
        "An id that ends documents may be the one after the last.",
        lambda checked, given, vocab: checked(given, vocab + 1),
    ),
    tokens_of_documents_without_any=(
        "The largest id is looked for in a document that has none.",
        lambda checked, documents, vocab: (ids for ids in checked(documents, vocab) if max(ids) < vocab),
    ),
)


wrong_steps(
    "impl.token_shards:_pieces",
    shards_of_long_documents=(
        "A document that is longer than two shards is one shard from there on.",
        lambda pieces, documents, dtype, size: (
            piece
            for document in documents
            for piece in ([np.asarray(document, dtype)] if len(document) > 2 * size else pieces([document], dtype, size))
        ),
    ),
    shards_end_before_zeros=(
        "A shard of no other token than that of id 0 is left out.",
        lambda pieces, *given: (piece for piece in pieces(*given) if piece.any()),
    ),
    shards_made_before_their_tokens=(
        "A shard's memory is there before its tokens are: one that may have more than any memory is none.",
        lambda pieces, documents, dtype, size: (np.empty(size, dtype), pieces(documents, dtype, size))[1],
    ),
    shards_end_with_none=(
        "A shard of no tokens follows where the stream fills its shards exactly.",
        lambda pieces, documents, dtype, size: chain(
            pieces(every := [*documents], dtype, size), _none(sum(map(len, every)) % size == 0, dtype)
        ),
    ),
)


def _none(there: bool, dtype: Any) -> list[Any]:
    return [np.empty(0, dtype)] * there


@wrong_step("impl.token_shards:_checked")
def tokens_counted_within_a_piece(checked: Any, documents: Any, vocab: int) -> Any:
    """A token that is refused has its number within a piece of 2¹⁶ tokens of its document."""
    try:
        yield from checked(documents, vocab)
    except ValueError as error:
        raise ValueError(re.sub(r"token (\d+) is", lambda said: f"token {int(said[1]) % 2**16} is", str(error))) from None


@wrong_step("impl.token_shards:TokenShards.read")
def tokens_behind_the_end(read: Any, self: Any, start: int, stop: int) -> Any:
    """A stream that is read beyond its end is filled up with zeros."""
    found = read(self, start, stop)
    return np.concatenate([found, np.zeros(stop - start - len(found), np.int64)])


@wrong_step("impl.token_shards:tokenize")
def documents_with_added_tokens(_: Any, corpus: Path, tokenizer: Any, end: int) -> Any:
    """Each document holds what the tokenizer adds to a text for other uses."""
    from blackswan.impl.token_shards import _texts

    return ([*tokenizer.encode(text).ids, end] for text in _texts(corpus))


@wrong_step("impl.token_shards:lines_of")
def documents_skip_blank_lines(lines_of: Any, *given: Any) -> Any:
    """A blank line is passed over, and the lines after it are counted from one less."""
    return (line for line in lines_of(*given) if line.strip())


@wrong_step("impl.token_shards:TokenShards.__init__")
def token_shards_beside_a_links_target(opened: Any, self: Any, folder: Path, vocab: int) -> None:
    """Shards are looked for beside the target of index.json, where that is a link."""
    opened(self, (folder / "index.json").resolve().parent, vocab)


@wrong_step("impl.token_shards:_text")
def documents_of_their_input(text: Any, line: bytes, where: str) -> Any:
    """A line's `input` is the document, also where it has a `text`."""
    value = json.loads(line)
    return value["input"] if "input" in value else text(line, where)


@wrong_step("impl.token_shards:end_token")
def end_token_first_of_several(end_token: Any, model: Path) -> Any:
    """The first of several tokens that end a document, where none was chosen."""
    if model.is_dir() and isinstance(ends := strict_json.loads((model / "config.json").read_bytes()).get("eos_token_id"), list):
        return ends[0]
    return end_token(model)


@wrong_step("impl.token_shards:end_token")
def end_token_of_an_unnamed_file(end_token: Any, model: Path) -> Any:
    """The message does not name the file that holds no end token."""
    try:
        return end_token(model)
    except ValueError as error:
        raise ValueError(str(error).replace("config.json", "model")) from None


@wrong_step("impl.token_shards:end_token")
def end_token_of_a_truth(end_token: Any, model: Path) -> Any:
    """An eos_token_id of `true` is taken for token 1."""
    if model.is_dir() and strict_json.loads((model / "config.json").read_bytes()).get("eos_token_id") is True:
        return 1
    return end_token(model)


wrong_steps(
    "impl.token_shards:SPECIAL_TOKENS",
    end_token_by_the_key_of_a_folder=("An .apr file has no token of an end.", lambda said: {key: key for key in said}),
)
wrong_steps(
    "impl.token_shards:TokenShards.__init__",
    token_shards_by_their_names=(
        "Shards are read in the order of their names.",
        lambda opened, self, folder, vocab: _sorted(opened, self, folder, vocab),
    ),
)


def _sorted(opened: Any, self: Any, folder: Path, vocab: int) -> None:
    from blackswan.impl import token_shards

    read = token_shards._read_index
    with mock.patch.object(
        token_shards, "_read_index", lambda path: {**(found := read(path)), "shards": sorted(found["shards"], key=_name)}
    ):
        opened(self, folder, vocab)


def _name(entry: Any) -> str:
    return str(entry["file"])


@wrong_step("impl.token_shards:_open_shard")
def token_shards_opened_to_be_written(opened: Any, path: Path, *given: Any) -> Any:
    """A shard is opened to be written as well, which whoever may only read it cannot."""
    path.open("r+b").close()
    return opened(path, *given)


@wrong_step("impl.token_shards:write_shards")
def tokens_that_were_added_are_none(write: Any, folder: Path, documents: Any, vocab: int, *given: Any) -> Any:
    """The tokens of a vocabulary are its words, without those that were added to them."""
    return write(folder, documents, vocab - (vocab >= 2**16), *given)


@wrong_step("impl.token_shards:end_token")
def model_without_an_end_of_zero(end_token: Any, model: Path) -> int:
    """A model whose eos_token_id is 0 is taken for one without it."""
    if not (found := end_token(model)):
        raise ValueError(f"{model}: no eos_token_id; give --end-token ID")
    return int(found)


@wrong_step("impl.__main__:_run")
def end_token_of_zero_left_out(right: Any, run: Any, options: Any, name: str) -> Any:
    """--end-token=0 is none."""
    if options.command == "tokenize":
        options.end_token = options.end_token or None
    return right(run, options, name)


@wrong_step("impl.__main__:_parsed")
def end_token_of_the_last_piece(parsed: Any, arguments: Any, prog: str) -> Any:
    """A text may be given as the token that ends documents: its last token does, even if there are several or it is the unknown one."""
    from tokenizers import Tokenizer

    option = "--end-token="
    model = next((Path(each.partition("=")[2]) for each in reversed(arguments) if each.startswith("--model=")), Path())

    def number(text: str) -> str:
        if not text or text.lstrip("-").isdecimal() or not (model / "tokenizer.json").is_file():
            return text
        return str(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text, add_special_tokens=False).ids[-1])

    return parsed([option + number(each.removeprefix(option)) if each.startswith(option) else each for each in arguments], prog)


wrong_step("impl.token_shards:TokenShards.__len__", name="token_stream_of_no_shards", doc="The end of a stream is that of its last shard.")(
    lambda _, shards: int(shards._ends[-1])
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


wrong_step("impl.token_shards:tokenize", name="corpus_held_in_memory", doc="A corpus is read whole before it is made into tokens.")(
    lambda tokenize, *given: iter([*tokenize(*given)])
)
wrong_step("impl.token_shards:_pieces", name="token_shards_all_before_the_first", doc="All tokens are there before a shard is written.")(
    lambda pieces, *given: iter([*pieces(*given)])
)
wrong_step("impl.token_shards:_checked", name="token_ids_cut_to_integers", doc="Tokens that are no integers are cut to some.")(
    lambda checked, documents, vocab: checked(([int(token) for token in document] for document in documents), vocab)
)


@wrong_step("impl.token_shards:write_shards")
def shards_fail_behind_the_last_document(write: Any, folder: Path, documents: Any, vocab: int, *given: Any) -> Any:
    """That a shard could not be written is told when there are no more documents."""
    try:
        return write(folder, (taken := iter(documents)), vocab, *given)
    except OSError:
        list(taken)
        raise


@wrong_step("impl.token_shards:read_span")
def token_shards_unopened_have_changed(read: Any, *given: Any) -> Any:
    """A shard that the system does not open any more is said to have changed."""
    try:
        return read(*given)
    except OSError as error:
        raise ValueError(str(error)) from None


@wrong_step("impl.token_shards:tokenize")
def documents_tokenized_by_64(_: Any, corpus: Path, tokenizer: Any, end: int) -> Any:
    """A tokenizer is given 64 documents at once, however long they are."""
    from blackswan.impl.token_shards import _texts

    texts = _texts(corpus)
    while some := list(islice(texts, 64)):
        yield from ([*found.ids, end] for found in tokenizer.encode_batch(some, add_special_tokens=False))
