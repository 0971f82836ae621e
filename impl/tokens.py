"""Text to token ids: through a checkpoint's tokenizer.json, or as bytes where there is no checkpoint."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blackswan.impl import strict_json
from blackswan.impl.checkpoint import TOKENIZER, TOKENIZER_CONFIG, belonging, read_config

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIDES = ("right", "left")
QWEN2 = "Qwen2Tokenizer"
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
"""Of an added token: how texts are split at it."""


class Tokens(ABC):
    """Token ids of texts, with the length limit and padding of a run.

    `fill` is the id that pads, and the one token of a text without tokens; `vocab` the number of ids; `description` says where the ids
    come from.
    """

    fill: int
    vocab: int
    description: str

    def __init__(self, max_seq_len: int, padding_side: str) -> None:
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len is {max_seq_len}: expected at least 1")
        if padding_side not in SIDES:
            raise ValueError(f"padding_side is {padding_side!r}: expected one of {', '.join(SIDES)}")
        self.max_seq_len, self.padding_side = max_seq_len, padding_side

    @abstractmethod
    def measure(self, texts: Sequence[str]) -> list[tuple[list[int], int]]:
        """The ids of each text, 1 to max_seq_len of them with the end of a longer text cut off, and how many there were before."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, 1 to max_seq_len of them; the end of a longer text is cut off."""
        return self.measure([text])[0][0]

    def batch(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """input_ids (int64) and mask (true at real tokens), both [batch, longest]. Raises a ValueError for no texts, and as
        `require_texts` does."""
        require_texts(texts)
        return self.pad([self.encode(text) for text in texts])

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """input_ids and mask of rows of ids, padded to the longest."""
        if not rows:
            raise ValueError("the batch is empty")
        longest = max(len(row) for row in rows)
        input_ids = torch.full((len(rows), longest), self.fill, dtype=torch.int64, device="cpu")
        mask = torch.zeros(len(rows), longest, dtype=torch.bool, device="cpu")
        for index, row in enumerate(rows):
            span = slice(0, len(row)) if self.padding_side == "right" else slice(longest - len(row), longest)
            input_ids[index, span] = torch.tensor(row, device="cpu")
            mask[index, span] = True
        return input_ids, mask


def require_texts(texts: Sequence[str]) -> None:
    """Raise a TypeError for one text in the place of several: it is a sequence too, of its characters."""
    if isinstance(texts, str):
        raise TypeError(f"texts is one text, {texts[:20]!r}; expected a sequence of texts, such as a list of this one")


class CheckpointTokens(Tokens):
    """The tokenizer of a checkpoint. `fill` is the padding or end token that the file `settings` names, else 0."""

    def __init__(self, path: Path, settings: Path, max_seq_len: int, padding_side: str = "right") -> None:
        super().__init__(max_seq_len, padding_side)
        self._tokenizer = read_tokenizer(path)
        own = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        if own > max_seq_len:  # these are not cut off
            raise ValueError(
                f"max_seq_len is {max_seq_len}: {path} adds {own} tokens of its own to every text; expected that many at least"
            )
        self._tokenizer.enable_truncation(max_seq_len)
        named = _settings(settings)
        _require_alike(settings, named, {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()})
        self.fill = _fill_id(named, self._tokenizer.token_to_id)
        self.vocab = id_count(self._tokenizer)
        self.description = f"{path} ({self._tokenizer.get_vocab_size()} tokens)"

    @functools.cached_property
    def _whole(self) -> "Tokenizer":
        """The one without truncation, made when the first text is as long: a tokenizer of many tokens takes a second to read."""
        whole = type(self._tokenizer).from_str(self._tokenizer.to_str())
        whole.no_truncation()
        return whole

    def measure(self, texts: Sequence[str]) -> list[tuple[list[int], int]]:
        """The ids of each text and their number before truncation."""
        rows = [found.ids or [self.fill] for found in self._tokenizer.encode_batch_fast(texts)]
        # Not by what the library says has overflowed: versions 0.23.1 and 0.23.2 leave most of it out.
        full = [text for text, ids in zip(texts, rows, strict=True) if len(ids) >= self.max_seq_len]
        whole = iter(self._whole.encode_batch_fast(full) if full else ())
        return [(ids, len(ids) if len(ids) < self.max_seq_len else max(len(ids), len(next(whole)))) for ids in rows]


class ByteTokens(Tokens):
    """The UTF-8 bytes of a text, and 256 for padding: for a model with random weights, which has no tokenizer of its own."""

    fill = 256
    vocab = 257
    description = "UTF-8 bytes (257 tokens): random weights come without a tokenizer"

    def __init__(self, max_seq_len: int, padding_side: str = "right") -> None:
        super().__init__(max_seq_len, padding_side)

    def measure(self, texts: Sequence[str]) -> list[tuple[list[int], int]]:
        """The bytes of each text and their number before truncation."""
        rows = (list(text.encode()) or [self.fill] for text in texts)
        return [(ids[: self.max_seq_len], len(ids)) for ids in rows]


def read_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of a tokenizer.json, which cuts and pads nothing. Raises a ValueError where it is broken or draws at random."""
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises Exception itself
        raise ValueError(f"{path}: not a usable tokenizer ({error})") from None
    found.no_truncation()
    found.no_padding()
    if dropout := getattr(found.model, "dropout", None):
        raise ValueError(f"{path}: dropout is {dropout:g}, so that a text has other tokens each time; expected null")
    return found


def id_count(tokenizer: "Tokenizer") -> int:
    """One more than the largest id, which is more than there are tokens where some ids have none."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def load_tokenizer(folder: Path, max_seq_len: int, padding_side: str = "right") -> CheckpointTokens:
    """The tokenizer of a checkpoint folder, or the one beside an .apr file.

    Raises a FileNotFoundError without tokenizer.json (`MODEL.tokenizer.json` for `MODEL.apr`) and a ValueError for a damaged one.
    """
    path = belonging(folder, TOKENIZER)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a checkpoint cannot be used without its own tokenizer, copy it there")
    settings = belonging(folder, TOKENIZER_CONFIG)
    tokens = CheckpointTokens(path, settings, max_seq_len, padding_side)
    _require_no_prefix(folder, settings, path)
    return tokens


def _settings(path: Path) -> dict[str, Any]:
    """The content of a tokenizer_config.json; empty where there is none."""
    if not path.is_file():
        return {}
    try:
        settings = strict_json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return settings


def _require_alike(path: Path, settings: Mapping[str, Any], added: Mapping[str, Any]) -> None:
    """Raises a ValueError for settings by which transformers would split texts otherwise than tokenizer.json says.

    It adds every token that is named there and is no added token of tokenizer.json, and texts are then split at it.
    """
    if settings.get("split_special_tokens"):
        raise ValueError(f"{path}: split_special_tokens is true; expected false or no such key: special tokens are never split here")
    decoder, additional = settings.get("added_tokens_decoder"), settings.get("additional_special_tokens")
    extra = settings.get("extra_special_tokens")
    if extra and not isinstance(extra, dict | list):
        raise ValueError(f"{path}: extra_special_tokens is {extra!r}; expected a list or an object of tokens")
    named = [(key, value) for key, value in settings.items() if key.endswith("_token") and not isinstance(value, bool)]
    named += [("added_tokens_decoder", value) for value in (decoder.values() if isinstance(decoder, dict) else ())]
    named += [("additional_special_tokens", value) for value in (additional if isinstance(additional, list) else ())]
    named += [("extra_special_tokens", value) for value in (extra.values() if isinstance(extra, dict) else extra or ())]
    for key, value in named:
        token = _content(value)
        if token is not None and token not in added:
            raise ValueError(
                f"{path}: {key} names {token!r}, which is not among the added_tokens of {TOKENIZER}: transformers would split texts at it; "
                "add it there, or remove it here"
            )
        if token is None or key != "added_tokens_decoder" or not isinstance(value, dict):
            continue
        flags = [name for name in _FLAGS if _flag(value, name) != getattr(added[token], name)]
        if flags:
            raise ValueError(f"{path}: {key} gives {token!r} another {flags[0]} than {TOKENIZER} does; make them equal")


def _require_no_prefix(model: Path, settings: Path, tokenizer: Path) -> None:
    """Raises a ValueError where Qwen2Tokenizer of transformers would put a space before texts and their words, and tokenizer.json does not.

    Other classes leave the pre-tokenizer of bytes in tokenizer.json as it is.
    """
    named = _settings(settings)
    if named.get("add_prefix_space") is not True or not _is_qwens(named, read_config(model).family):
        return
    found = strict_json.loads(read_tokenizer(tokenizer).to_str())["pre_tokenizer"] or {}
    if any(part["type"] == "ByteLevel" and not part["add_prefix_space"] for part in (found, *found.get("pretokenizers", ())) if part):
        raise ValueError(f"{settings}: add_prefix_space is true, and false in the pre_tokenizer of {TOKENIZER}; make them equal")


def _is_qwens(settings: Mapping[str, Any], family: str) -> bool:
    """AutoTokenizer of transformers 5 takes its Qwen2Tokenizer for Qwen2 whatever class is named, and for Qwen3 also where none is."""
    usual = QWEN2 if family == "qwen3" else ""
    return family == "qwen2" or str(settings.get("tokenizer_class") or usual).startswith(QWEN2)


def _flag(token: Mapping[str, Any], name: str) -> Any:
    """A flag of an added token. One that is left out is false, as transformers reads it, and `normalized` the contrary of `special`."""
    return token.get(name, name == "normalized" and not token.get("special", False))


def _fill_id(settings: Mapping[str, Any], token_to_id: Callable[[str], int | None]) -> int:
    """The padding or end token that a tokenizer_config.json names, else 0; the mask hides it wherever it pads."""
    for key in ("pad_token", "eos_token"):
        token = _content(settings.get(key))
        found = token_to_id(token) if token is not None else None
        if found is not None:
            return int(found)
    return 0


def _content(token: Any) -> str | None:
    """The text of a token as a tokenizer_config.json names it, plainly or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
