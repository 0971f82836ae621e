"""Token ids of a corpus against the `tokenizers` library's own, their statistics, and the batches made of them."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly, value_at_most, value_within
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.system.written import equal, renamed, written
from blackswan.reference.table import Array, Arrays

PERCENTILES = (50, 90, 95, 99)
EOS = "<eos>"


@contextmanager
def _tokenizer(rng: Generator) -> Iterator[tuple[str, Callable[[str], list[int]], bool]]:
    """A tokenizer folder, every id of a text by the library alone, and whether an end token closes each text.

    One of the shipped tokenizer's variants: as it is; with an end token; with a truncation and a padding of its own, which a run's
    settings replace.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    variant = int(rng.integers(0, 3))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(CHECKPOINT / "tokenizer.json", folder)
        plain = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
        end = plain.encode(EOS).ids[0]
        if variant:
            changed = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
            if variant == 1:
                changed.post_processor = TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, end)])
            else:
                changed.enable_truncation(3, direction="left")
                changed.enable_padding(length=7, pad_id=5)
            changed.save(str(Path(folder) / "tokenizer.json"))
        closing = [end] if variant == 1 else []
        yield folder, lambda text: [*plain.encode(text).ids, *closing], bool(closing)


def _kept(ids: list[int], limit: int, closed: bool) -> list[int]:
    """The ids of a text that stay: its beginning, and the end token, which truncation spares."""
    if len(ids) <= limit:
        return ids or [0]
    return [*ids[: limit - 1], ids[-1]] if closed else ids[:limit]


def tokens_are_the_tokenizers_own(attack: Attack, case: Case) -> list[Comparison]:
    """Ids of each text against the `tokenizers` library's, cut to max_seq_len; 1 to max_seq_len of them; twice the same."""
    rng = generator_for(case.seed, "tokens")
    with written(rng, multi_label=False) as corpus, _tokenizer(rng) as (folder, encode, closed):
        limit = int(rng.integers(2, 40))
        scalars = {**corpus.scalars, "tokenizer": folder, "max_seq_len": limit}
        answer, again = attack.answer(case, scalars=scalars), attack.answer(case, scalars=scalars)
        rows = [_kept(encode(text), limit, closed) for text in corpus.texts]
    found = equal(answer, lengths=[len(row) for row in rows], ids=[token for row in rows for token in row], labels=corpus.expected_labels)
    outside = int(np.sum((answer["lengths"] < 1) | (answer["lengths"] > limit)))
    found.append(value_at_most("samples of another length than 1 to max_seq_len", outside, 0))
    return [*found, *(renamed(f"{name}, again", compare_exactly(name, answer[name], again[name])) for name in answer)]


def bytes_are_tokens_without_a_tokenizer(attack: Attack, case: Case) -> list[Comparison]:
    """UTF-8 bytes cut to max_seq_len, a padding id that is no byte, and a description that says so."""
    rng = generator_for(case.seed, "tokens")
    with written(rng, multi_label=False) as corpus:
        limit = int(rng.integers(1, 40))
        answer = attack.answer(case, scalars={**corpus.scalars, "tokenizer": "", "max_seq_len": limit})
    fill = int(answer["fill"])
    rows = [list(text.encode()[:limit]) or [fill] for text in corpus.texts]
    found = equal(answer, lengths=[len(row) for row in rows], ids=[token for row in rows for token in row], vocab=257)
    found.append(value_within("padding id", fill, 256, 256))
    said = answer["description"].tobytes().decode()
    if not ("bytes" in said and "random" in said):
        found.append(broken("description", "does not say that random weights read bytes", "bytes … random", said))
    return found


def statistics_are_numpys(attack: Attack, case: Case) -> list[Comparison]:
    """Totals, samples a class, imbalance, and percentiles of the lengths before truncation, against NumPy's of the library's ids.

    Of a whole corpus, and of some samples of it, as the parts of a split are.
    """
    rng = generator_for(case.seed, "statistics")
    multi_label = bool(rng.random() < 0.5)
    with written(rng, multi_label=multi_label, count=int(rng.integers(30, 130))) as corpus, _tokenizer(rng) as (folder, encode, closed):
        limit = int(rng.integers(2, 60))
        scalars = {**corpus.scalars, "tokenizer": folder, "max_seq_len": limit}
        count = len(corpus.texts)
        some = rng.permutation(count)[: int(rng.integers(count // 2, count))]
        answers = attack.answer(case, scalars=scalars), attack.answer(case, scalars={**scalars, "indices": some.tolist()})
        lengths = np.asarray([max(1, len(encode(text))) for text in corpus.texts])
    del closed
    found = _statistics(answers[0], lengths, corpus.multi_hot, limit)
    return found + [
        renamed(f"selected: {each.tensor}", each) for each in _statistics(answers[1], lengths[some], corpus.multi_hot[some], limit)
    ]


def _statistics(answer: Arrays, lengths: Array, multi_hot: Array, limit: int) -> list[Comparison]:
    counts = multi_hot.sum(axis=0)
    return equal(
        answer,
        total=len(lengths),
        class_counts=counts,
        percentiles=[(percent, np.percentile(lengths, percent, method="inverted_cdf")) for percent in PERCENTILES],
        max_length=lengths.max(),
        truncated=np.sum(lengths > limit),
        minority=counts.min(),
        imbalance=counts.max() / counts.min() if counts.min() else np.inf,
    )


def batches_are_padded_and_masked(attack: Attack, case: Case) -> list[Comparison]:
    """Each row holds its ids on the side away from the padding, its mask is true there and nowhere else, and its label is its own.

    The same from raw text. Ids that happen to equal the padding id are real tokens.
    """
    rng = generator_for(case.seed, "batch")
    multi_label, side = bool(rng.random() < 0.5), str(rng.choice(["left", "right"]))
    with written(rng, multi_label=multi_label) as corpus, _tokenizer(rng) as (folder, encode, closed):
        limit = int(rng.integers(2, 40))
        indices = [0, *(int(i) for i in rng.permutation(len(corpus.texts))[: int(rng.integers(1, 6))])]
        scalars = {"tokenizer": folder, "max_seq_len": limit, "padding_side": side, "indices": indices}
        answer = attack.answer(case, scalars={**corpus.scalars, **scalars})
        rows = [_kept(encode(corpus.texts[index]), limit, closed) for index in indices]
    lengths = np.asarray([len(row) for row in rows])
    columns = np.arange(lengths.max())
    mask = columns < lengths[:, None] if side == "right" else columns >= lengths.max() - lengths[:, None]
    found = []
    for name in ("", "raw_"):
        found += equal(answer, **{f"{name}mask": mask})
        given = answer[f"{name}input_ids"]
        shaped = given.shape == mask.shape
        found += equal({f"{name}input_ids": given[mask] if shaped else given}, **{f"{name}input_ids": np.concatenate(rows)})
    wanted = np.dtype(np.float32 if multi_label else np.int64)
    if answer["labels"].dtype != wanted:
        found.append(broken("labels", "dtype", str(wanted), str(answer["labels"].dtype)))
    return found + equal(answer, labels=corpus.expected_labels[indices])
