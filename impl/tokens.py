"""Text to token ids: through a checkpoint's tokenizer.json, or as bytes where there is no checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from blackswan.impl import strict_json
from blackswan.impl.checkpoint import TOKENIZER

SIDES = ("right", "left")


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
    def measure(self, text: str) -> tuple[list[int], int]:
        """The ids of a text, 1 to max_seq_len of them with the end of a longer text cut off, and how many there were before."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, 1 to max_seq_len of them; the end of a longer text is cut off."""
        return self.measure(text)[0]

    def batch(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """input_ids (int64) and mask (true at real tokens), both [batch, longest]. Raises a ValueError for no texts."""
        return self.pad([self.encode(text) for text in texts])

    def pad(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """input_ids and mask of rows of ids, padded to the longest."""
        if not rows:
            raise ValueError("the batch is empty")
        longest = max(len(row) for row in rows)
        input_ids = torch.full((len(rows), longest), self.fill, dtype=torch.int64)
        mask = torch.zeros(len(rows), longest, dtype=torch.bool)
        for index, row in enumerate(rows):
            span = slice(0, len(row)) if self.padding_side == "right" else slice(longest - len(row), longest)
            input_ids[index, span] = torch.tensor(row)
            mask[index, span] = True
        return input_ids, mask


class CheckpointTokens(Tokens):
    """The tokenizer of a checkpoint. `fill` is by default the padding or end token that tokenizer_config.json names, else 0."""

    def __init__(self, path: Path, max_seq_len: int, padding_side: str = "right", fill: int | None = None) -> None:
        from tokenizers import Tokenizer

        super().__init__(max_seq_len, padding_side)
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer, self._whole = (Tokenizer.from_str(text) for _ in range(2))
            for each in (self._tokenizer, self._whole):
                each.no_padding()
            self._tokenizer.enable_truncation(max_seq_len)
            self._whole.no_truncation()
        except Exception as error:  # tokenizers raises Exception itself
            raise ValueError(f"{path}: not a usable tokenizer ({error})") from None
        self.fill = _fill_id(path.parent, self._tokenizer.token_to_id) if fill is None else fill
        self.vocab = self._tokenizer.get_vocab_size()
        self.description = f"{path} ({self.vocab} tokens)"

    def measure(self, text: str) -> tuple[list[int], int]:
        """The ids of a text and their number before truncation."""
        ids = self._tokenizer.encode(text).ids or [self.fill]
        # Not by what the library says has overflowed: versions 0.23.1 and 0.23.2 leave most of it out.
        return ids, len(ids) if len(ids) < self.max_seq_len else max(len(ids), len(self._whole.encode(text).ids))


class ByteTokens(Tokens):
    """The UTF-8 bytes of a text, and 256 for padding: for a model with random weights, which has no tokenizer of its own."""

    fill = 256
    vocab = 257
    description = "UTF-8 bytes (257 tokens): random weights come without a tokenizer"

    def __init__(self, max_seq_len: int, padding_side: str = "right") -> None:
        super().__init__(max_seq_len, padding_side)

    def measure(self, text: str) -> tuple[list[int], int]:
        """The bytes of a text and their number before truncation."""
        ids = list(text.encode()) or [self.fill]
        return ids[: self.max_seq_len], len(ids)


def load_tokenizer(folder: Path, max_seq_len: int, padding_side: str = "right", fill: int | None = None) -> CheckpointTokens:
    """The tokenizer of a checkpoint folder. Raises a FileNotFoundError without tokenizer.json and a ValueError for a damaged one."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; a checkpoint cannot be used without its own tokenizer, copy it into the folder")
    return CheckpointTokens(path, max_seq_len, padding_side, fill)


def _fill_id(folder: Path, token_to_id: Callable[[str], int | None]) -> int:
    """The padding or end token that tokenizer_config.json names, else 0; the mask hides it wherever it pads."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return 0
    try:
        settings = strict_json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: expected a JSON object")
    for key in ("pad_token", "eos_token"):
        token = settings.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        found = token_to_id(token) if isinstance(token, str) else None
        if found is not None:
            return int(found)
    return 0
