"""Wrong tokenizers, and wrong batches of token ids: one step of `impl` replaced each."""

import json
import threading
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blackswan.falsifiers.mutants.changes import of_result
from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]
Indices = list[int]


def _made(change: Callable[[Any, Path], object]) -> Step:
    """A tokenizer changed once it is made: (tokens, its file)."""

    def make(initialise: Step, self: Any, path: Path, *others: Any) -> None:
        initialise(self, path, *others)
        change(self, path)

    return make


def _padded_as_in_the_file(tokens: Any, path: Path) -> None:
    padding = json.loads(path.read_text(encoding="utf-8"))["padding"]
    if padding:
        tokens._tokenizer.enable_padding(length=padding["strategy"]["Fixed"], pad_id=padding["pad_id"])


def _named_beside(path: Path, key: str, otherwise: Any) -> Any:
    """The value of a key in the tokenizer_config.json beside a tokenizer."""
    file = path.with_name("tokenizer_config.json")
    return json.loads(file.read_bytes()).get(key, otherwise) if file.is_file() else otherwise


wrong_steps(
    "impl.tokens:CheckpointTokens.__init__",
    by=_made,
    tokens_cut_on_the_named_side=(
        "Texts are cut on the side that tokenizer_config.json names as truncation_side.",
        lambda self, path: self._tokenizer.enable_truncation(self.max_seq_len, direction=_named_beside(path, "truncation_side", "right")),
    ),
    tokens_within_the_named_length=(
        "The model_max_length of tokenizer_config.json cuts texts that the settings let be longer.",
        lambda self, path: self._tokenizer.enable_truncation(
            max(self._tokenizer.num_special_tokens_to_add(False), min(self.max_seq_len, _named_beside(path, "model_max_length", 2**62)))
        ),
    ),
    tokens_padded_on_the_named_side=(
        "Batches are padded on the side that tokenizer_config.json names.",
        lambda self, path: setattr(self, "padding_side", _named_beside(path, "padding_side", self.padding_side)),
    ),
    tokens_cut_from_the_left=(
        "The beginning of a longer text is cut off.",
        lambda self, _: self._tokenizer.enable_truncation(self.max_seq_len, direction="left"),
    ),
    tokens_with_bpe_dropout=("Merges left out at random.", lambda self, _: setattr(self._tokenizer.model, "dropout", 0.3)),
    tokens_padding_of_the_file_kept=("The padding that tokenizer.json asks for becomes tokens of the text.", _padded_as_in_the_file),
)


def _measured(found: list[tuple[Indices, int]], texts: Sequence[str]) -> list[tuple[str, Indices, int]]:
    return [(text, *each) for text, each in zip(texts, found, strict=True)]


def _split(tokens: Any, text: str) -> int:
    """Tokens of a text, in which special ones are split as any other text is."""
    whole = type(tokens._tokenizer).from_str(tokens._tokenizer.to_str())
    whole.no_truncation()
    whole.encode_special_tokens = True
    return len(whole.encode(text).ids)


@wrong_step("impl.tokens:CheckpointTokens.measure")
def tokenizer_cuts_by_turns(measure: Callable[..., Any], self: Any, texts: Any) -> Any:
    """One tokenizer cuts texts and, while it does not, counts all of their tokens, whichever thread asks it meanwhile."""
    cut = measure(self, texts)
    self._tokenizer.no_truncation()
    counts = [len(each.ids) for each in self._tokenizer.encode_batch_fast(texts)]
    self._tokenizer.enable_truncation(self.max_seq_len)
    return [(ids, max(len(ids), count)) for (ids, _), count in zip(cut, counts, strict=True)]


wrong_steps(
    "impl.tokens:CheckpointTokens.measure",
    by=lambda change: lambda measure, self, texts: [change(self, *each) for each in _measured(measure(self, texts), texts)],
    tokens_limit_exclusive=("One token fewer than max_seq_len.", lambda self, _, ids, n: (ids[: max(1, self.max_seq_len - 1)], n)),
    tokens_empty_text_gives_none=("An empty text has no token.", lambda _, text, ids, length: (ids if text else [], length)),
    statistics_of_split_tokens=(
        "Of a text that is cut, special tokens are counted by the text of their names.",
        lambda self, text, ids, length: (ids, length if length < self.max_seq_len else max(len(ids), _split(self, text))),
    ),
    statistics_of_characters=("Lengths in characters.", lambda _, text, ids, __: (ids, max(1, len(text)))),
    statistics_after_truncation=(
        "Lengths after truncation: the 99th percentile never exceeds max_seq_len.",
        lambda _, __, ids, ___: (ids, len(ids)),
    ),
)


_READ: dict[bytes, Any] = {}


@wrong_step("impl.tokens:read_tokenizer")
def tokenizer_shared_by_its_readers(read: Step, path: Path) -> Any:
    """A tokenizer is read once, and all who read it cut texts at the limit of the last one."""
    content = path.read_bytes()
    if content not in _READ:
        _READ[content] = read(path)
    return _READ[content]


@wrong_step("impl.tokens:CheckpointTokens.measure")
def tokens_text_normalised(measure: Step, self: Any, texts: Sequence[str]) -> Any:
    """Texts brought to NFC first."""
    return measure(self, [unicodedata.normalize("NFC", text) for text in texts])


@wrong_step("impl.tokens:CheckpointTokens.measure")
def tokens_end_token_cut_off(_: Step, self: Any, texts: Sequence[str]) -> list[tuple[Indices, int]]:
    """Truncation takes the closing token."""
    rows = [self._whole.encode(text).ids or [self.fill] for text in texts]
    return [(ids[: self.max_seq_len], len(ids)) for ids in rows]


@wrong_step("impl.tokens:CheckpointTokens.measure")
def tokens_of_their_own_at_the_end(_: Step, self: Any, texts: Sequence[str]) -> list[tuple[Indices, int]]:
    """A text that is cut keeps its last tokens, as if all that a tokenizer adds stood behind the text."""
    own = self._tokenizer.num_special_tokens_to_add(is_pair=False)
    rows = [self._whole.encode(text).ids or [self.fill] for text in texts]
    cut = self.max_seq_len - own
    return [(ids if len(ids) <= self.max_seq_len else [*ids[:cut], *ids[len(ids) - own :]], len(ids)) for ids in rows]


@wrong_step("impl.saved:_tokens")
def saved_models_read_bytes(tokens: Step, source: Any, config: Any) -> Any:
    """A saved model that lacks its tokenizer reads texts as bytes, as random weights do."""
    from blackswan.impl.tokens import ByteTokens

    try:
        return tokens(source, config)
    except FileNotFoundError:
        return ByteTokens(config.max_seq_len, config.padding_side)


@wrong_step("impl.tokens:load_tokenizer")
def tokenizer_falls_back_to_bytes(load: Step, folder: Path, max_seq_len: int, padding_side: str = "right") -> Any:
    """Bytes instead of a tokenizer that is missing or broken."""
    from blackswan.impl.tokens import ByteTokens

    try:
        return load(folder, max_seq_len, padding_side)
    except (FileNotFoundError, ValueError):
        return ByteTokens(max_seq_len, padding_side)


@wrong_step("impl.tokens:ByteTokens.measure")
def byte_tokens_of_characters(_: Step, self: Any, texts: Sequence[str]) -> list[tuple[Indices, int]]:
    """Code points instead of bytes."""
    rows = ([min(ord(character), 255) for character in text] or [self.fill] for text in texts)
    return [(ids[: self.max_seq_len], len(ids)) for ids in rows]


@wrong_step("impl.tokens:ByteTokens.measure")
def byte_tokens_of_question_marks(measure: Step, self: Any, texts: Sequence[str]) -> list[tuple[Indices, int]]:
    """Half of a surrogate pair is a question mark."""
    return [*measure(self, [text.encode(errors="replace").decode() for text in texts])]


@wrong_step("impl.tokens:ByteTokens.measure")
def byte_tokens_counted_after_truncation(measure: Step, self: Any, texts: Sequence[str]) -> list[tuple[Indices, int]]:
    """Lengths after truncation where there is no tokenizer."""
    return [(ids, len(ids)) for ids, _ in measure(self, texts)]


wrong_steps(
    "impl.tokens:_fill_id",
    tokens_fill_with_zero=("An empty text is the token 0, whatever the tokenizer names.", lambda *_: 0),
    tokens_fill_with_the_end=(
        "The end token fills, also where there is a padding token.",
        lambda fill, settings, find: fill({"pad_token": settings.get("eos_token") or settings.get("pad_token")}, find),
    ),
    tokens_fill_of_plain_names=(
        "A token that is named by an object is passed over.",
        lambda fill, settings, find: fill({key: name for key, name in settings.items() if isinstance(name, str)}, find),
    ),
)
wrong_step("impl.tokens:ByteTokens.measure", name="byte_tokens_counted_in_15_bits", doc="The bytes of a text are counted in 15 bits.")(
    lambda measure, tokens, texts: [(ids, count % 2**15) for ids, count in measure(tokens, texts)]
)
wrong_steps("impl.tokens:ByteTokens.fill", byte_tokens_pad_with_a_byte=("Padding is the byte 0.", lambda _: 0))
wrong_steps(
    "impl.tokens:ByteTokens.description",
    byte_tokens_say_nothing=("No word that there is no tokenizer.", lambda _: "tokenizer (257 tokens)"),
)


wrong_steps(
    "impl.tokens:Tokens.pad",
    by=lambda change: lambda pad, self, rows: change(self, *pad(self, rows)),
    batch_padding_counts_as_real=("Padding is true in the mask.", lambda _, ids, mask: (ids, mask | True), "P11"),
    batch_mask_from_padding_id=("Mask from the padding id, which is also a token.", lambda self, ids, _: (ids, ids != self.fill), "P8"),
    batch_mask_off_by_one=(
        "Mask of left padding one column off.",
        lambda self, ids, mask: (ids, mask.roll(1, 1) if self.padding_side == "left" else mask),
        "P9",
    ),
)


@wrong_step("impl.tokens:Tokens.pad")
def batch_padding_side_ignored(pad: Step, self: Any, rows: Any) -> Any:
    """Padded on the right whatever the settings say."""
    side, self.padding_side = self.padding_side, "right"
    try:
        return pad(self, rows)
    finally:
        self.padding_side = side


@wrong_step("impl.tokens:Tokens.batch")
def batch_raw_text_stripped(batch: Step, self: Any, texts: Sequence[str]) -> Any:
    """Raw texts are not treated as pre-tokenised ones."""
    return batch(self, [text.strip() for text in texts])


wrong_steps(
    "impl.samples:Samples.batch",
    by=of_result,
    batch_labels_of_the_next_sample=("Labels one sample off.", lambda batch: replace(batch, labels=batch.labels.roll(1, 0))),
    batch_multi_hot_in_integers=("Multi-hot labels are integers.", lambda batch: replace(batch, labels=batch.labels.long())),
)


wrong_step(
    "impl.samples:Samples.select", name="samples_selected_are_all", doc="A selection of as many samples as a corpus has is in its order."
)(lambda select, samples, places: samples if len(places) == len(samples) > 1 else select(samples, places))


@wrong_step("impl.samples:Samples.batch")
def batch_between_its_ends(batch: Any, samples: Any, places: Any, *given: Any) -> Any:
    """A batch is in the order of the file if as many samples lie between its first and its last."""
    first, *inner, last = [int(place) for place in places] if len(places) > 1 else [0, 0]
    found = batch(samples, places, *given)
    if last - first != len(places) - 1:
        return found
    other = batch(samples, [first, *sorted(inner), last], *given)
    return replace(other, labels=found.labels)


@wrong_step("impl.samples:Samples.batch")
def batch_labels_at_a_tuple(batch: Any, samples: Any, places: Any, *given: Any) -> Any:
    """A tuple of places is one place in an array of as many dimensions."""
    found = batch(samples, places, *given)
    return replace(found, labels=torch.from_numpy(samples.targets[places])) if isinstance(places, tuple) else found


@wrong_step("impl.tokens:CheckpointTokens.__init__")
def tokens_around_a_text_beyond_the_limit(init: Step, self: Any, path: Path, settings: Path, limit: int, *side: str) -> None:
    """A limit below the number of tokens that the tokenizer puts around a text is taken, and rows are longer than it."""
    init(self, path, settings, max(limit, 2), *side)
    self.max_seq_len = limit
    self._tokenizer.enable_truncation(limit)


@wrong_step("impl.tokens:CheckpointTokens.__init__")
def tokens_fill_of_the_last_reader(init: Step, self: Any, *given: Any) -> None:
    """All tokenizers of a process pad with the token of the one that was read last."""
    init(self, *given)
    type(self).fill = vars(self).pop("fill")


@wrong_step("impl.tokens:read_tokenizer")
def special_tokens_in_texts_split(read: Step, path: Path) -> Any:
    """A special token that a text names is split as if it were any text."""
    found = read(path)
    found.encode_special_tokens = True
    return found


@wrong_step("impl.tokens:read_tokenizer")
def tokenizer_with_dropout_of_zero_refused(read: Step, path: Path) -> Any:
    """A dropout of 0 is refused as if it left out merges."""
    found = read(path)
    if getattr(found.model, "dropout", None) is not None:
        raise ValueError(f"{path}: dropout is given; expected null")
    return found


@wrong_step("impl.tokens:_settings")
def tokens_fill_of_an_older_file(settings: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """special_tokens_map.json comes before tokenizer_config.json."""
    older = path.with_name("special_tokens_map.json")
    return {**settings(path), **(settings(older) if older.is_file() else {})}


@wrong_step("impl.tokens:CheckpointTokens.__init__")
def tokenizer_with_a_lock(made: Any, self: Any, *given: Any, **named: Any) -> None:
    """A tokenizer holds a lock, so that neither it nor its pipeline can be copied."""
    made(self, *given, **named)
    self._lock = threading.Lock()


@wrong_step("impl.tokens:CheckpointTokens._whole")
def tokenizer_read_again_for_long_texts(_: Any) -> Any:
    """What a text has beyond the limit is counted by a tokenizer that is read from its file when the first long text comes."""
    from blackswan.impl.tokens import read_tokenizer

    return property(lambda self: read_tokenizer(Path(self.description.rpartition(" (")[0])))
