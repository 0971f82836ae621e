"""Token ids of a corpus against the `tokenizers` library's own, their statistics, and the batches made of them."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_at_most
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import Batch, CorpusFile, Tokenizing
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, may_be_non_finite
from blackswan.falsifiers.system.written import written
from blackswan.reference.table import Array

PERCENTILES = (50, 90, 95, 99)
EOS, BOS = "<eos>", "<pad>"
AROUND = ((), (EOS,), (), (BOS,), (BOS, EOS))
"""What each variant of the shipped tokenizer puts around a text; the third one has a truncation, a padding and a dropout of 0 instead."""
MANY_CLASSES = 70_000
"""More than 16 bits count."""
LONG = 70_000
"""Tokens of a text that the model reads."""
LARGE_IDS = (0, 2**15, 2**16 - 1, 2**16, 151_935, 2**24 + 1)
"""The last of 15 and of 16 bits, the first of 17, the last of Qwen2's, and one that float32 does not hold."""
MORE_THAN_A_BYTE = 900
"""Samples, of which several hundred have a label."""
LONGEST_LINE = 10_000_000
"""Bytes of a line of a corpus, its end not among them."""
LINES = 50_000
"""Lines before one that is too long, of more than a million bytes."""


PASSED_OVER = {"truncation_side": "left", "padding_side": "left", "model_max_length": 2}
"""What tokenizer_config.json says to other programs: how a run cuts and pads texts is said by its settings alone."""
NAMED: tuple[tuple[dict[str, Any] | None, int], ...] = (
    *(
        (None, 0),
        ({}, 0),
        ({**PASSED_OVER, "bos_token": EOS, "unk_token": EOS}, 0),
        ({**PASSED_OVER, "pad_token": None, "eos_token": EOS}, 1),
        ({**PASSED_OVER, "pad_token": EOS, "eos_token": "<pad>"}, 1),
    ),
    *(
        ({**PASSED_OVER, "pad_token": "<pad>", "eos_token": EOS}, 0),
        ({**PASSED_OVER, "eos_token": {"content": EOS}, "bos_token": "<pad>"}, 1),
    ),
)
"""What tokenizer_config.json names, where there is one, and the id that pads and that an empty text is."""
SPECIAL = f"{EOS}rm {BOS}{EOS}"
"""A text that names special tokens, which are tokens there too."""
VERY_LONG = "}" * 70_000
"""A text of more tokens than 16 bits count."""


@contextmanager
def _tokenizer(rng: Generator, variant: int | None = None) -> Iterator[tuple[Path, Callable[[str], list[int]], tuple[int, int], int]]:
    """A tokenizer folder, every id of a text by the library alone, how many tokens stand before and behind it, and the id of padding.

    One of the shipped tokenizer's variants, drawn where none is named; a run's settings replace a truncation and a padding of its own.
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    variant = int(rng.integers(len(AROUND))) if variant is None else variant
    opening, closing = ([name] if name in AROUND[variant] else [] for name in (BOS, EOS))
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(CHECKPOINT / "tokenizer.json", folder)
        plain = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
        own = {name: plain.encode(name).ids[0] for name in (BOS, EOS)}
        if variant:
            changed = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
            if AROUND[variant]:
                changed.post_processor = TemplateProcessing(single=[*opening, "$A", *closing], special_tokens=[*own.items()])
            else:
                changed.enable_truncation(3, direction="left")
                changed.enable_padding(length=7, pad_id=5)
                changed.model.dropout = 0.0  # leaves out none, as null does
            changed.save(str(Path(folder) / "tokenizer.json"))
        named, fill = NAMED[int(rng.integers(len(NAMED)))]
        if named is not None:
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(named))
            if named.keys() & {"pad_token", "eos_token"}:  # an older file, which says otherwise, does not count
                older = {"pad_token": "<pad>" if fill else EOS, "eos_token": "<pad>"}
                (Path(folder) / "special_tokens_map.json").write_text(json.dumps(older))
        before, behind = ([own[name] for name in names] for names in (opening, closing))
        yield Path(folder), lambda text: [*before, *plain.encode(text).ids, *behind], (len(before), len(behind)), fill


def _kept(ids: list[int], limit: int, around: tuple[int, int], fill: int) -> list[int]:
    """The ids of a text that stay: its beginning, and the tokens around it, which truncation spares."""
    if len(ids) <= limit:
        return ids or [fill]
    _, behind = around
    return [*ids[: limit - behind], *ids[len(ids) - behind :]]


def _limit(rng: Generator, around: tuple[int, int]) -> int:
    """A number of tokens that a text may have, with those around it."""
    return max(sum(around), int(rng.integers(1, 40)))


@may_be_non_finite("*.imbalance")
def tokens_are_the_tokenizers_own(trial: Trial) -> Iterator[Comparison]:
    """The ids of each text are the `tokenizers` library's, cut to max_seq_len; there are 1 to max_seq_len of them, and the same again, also
    for two threads that ask at once."""
    for variant, own in enumerate(AROUND):
        found = _own_tokens(trial.rng(f"{variant}"), trial, variant)
        yield from (replace(each, tensor=f"{own or variant}: {each.tensor}") for each in found)


def _own_tokens(rng: Generator, trial: Trial, variant: int) -> list[Comparison]:
    with written(rng, multi_label=False, also=[SPECIAL]) as corpus, _tokenizer(rng, variant) as (folder, encode, around, fill):
        limit = _limit(rng, around)
        found, again = (trial.corpora.read(corpus.file, Tokenizing(folder, limit)) for _ in range(2))
        rows = [_kept(encode(text), limit, around, fill) for text in corpus.texts]
        ask = partial(trial.corpora.read, corpus.file, Tokenizing(folder, sum(around) - 1))
        too_few = [trial.refuses("fewer tokens than stand around a text", ask, "max_seq_len", "ValueError")] if sum(around) > 1 else []
        least = max(1, sum(around))
        shortest = [_kept(encode(text), least, around, fill) for text in corpus.texts]
        too_few += same("ids at the least max_seq_len", shortest, trial.corpora.read(corpus.file, Tokenizing(folder, least)).rows)
        between = trial.corpora.between_calls(corpus.texts[:3], Tokenizing(folder, least))
        without = trial.corpora.without_its_file(corpus.texts[:3], Tokenizing(folder, least))
        too_few += same("ids without the tokenizer's file, by a copy and by itself", [shortest[:3]] * 2, without)
        too_few += same("ids for another thread meanwhile", [], [each for each in between if each != shortest[:3]][:1])
    outside = sum(not 1 <= len(row) <= limit for row in found.rows)
    return [
        *same("ids", rows, found.rows),
        *same("id of padding", fill, found.fill),
        *same("labels", corpus.expected_labels, found.labels),
        value_at_most("samples of another length than 1 to max_seq_len", outside, 0),
        *same("again", found, again),
        *too_few,
    ]


@may_be_non_finite("*.imbalance")
def bytes_are_tokens_without_a_tokenizer(trial: Trial) -> list[Comparison]:
    """The ids are UTF-8 bytes cut to max_seq_len, the padding id is no byte, and the description says so; also beside a very long text."""
    rng = trial.rng("tokens")
    return [each for also in ([], [VERY_LONG]) for each in _bytes_of(trial, rng, also)]


def _bytes_of(trial: Trial, rng: Generator, also: list[str]) -> list[Comparison]:
    with written(rng, multi_label=False, also=also) as corpus:
        limit = int(rng.integers(1, 40))
        found = trial.corpora.read(corpus.file, Tokenizing(None, limit))
    rows = [list(text.encode()[:limit]) or [found.fill] for text in corpus.texts]
    compared = same("ids, vocab and padding id", [rows, 257, 256], [found.rows, found.vocab, found.fill])
    if not ("bytes" in found.description and "random" in found.description):
        compared.append(broken("description", "does not say that random weights read bytes", "bytes … random", found.description))
    lengths = np.asarray([max(1, len(text.encode())) for text in corpus.texts])
    return compared + _statistics("bytes", found.statistics, lengths, corpus.multi_hot, limit)


NO_ROOM = f"too large for the tokens of .*corpus.*TMPDIR.*{re.escape(tempfile.gettempdir())}"
"""The system's word for a file beyond its limit, what it was to hold, and where, in that order."""
PIECE = 10**5
"""Characters of a text, of which many are too long to be tokenised at once."""


@may_be_non_finite("*.imbalance")
def long_corpora_arrive(trial: Trial) -> Iterator[Comparison]:
    """Ids and labels of some thousand short texts, and of texts of half a million bytes, arrive as those of a few short ones do.

    A reader works them off in pieces: none is lost, doubled or moved where a piece ends. A line has ten million bytes at most.
    """
    rng = trial.rng("long")
    with _tokenizer(rng) as (folder, encode, around, fill), tempfile.TemporaryDirectory() as parent:
        short = [f"ls {index % 97}" for index in range(int(rng.integers(2049, 4096)))]
        known = {text: _kept(encode(text), 16, around, fill) for text in set(short)}
        corpora = {
            "many": (short, [known[text] for text in short], Tokenizing(folder, 16)),
            "long": (large := ["rm " * 180_000, "ls", "id"] * 4, [list(text[:LONG].encode()) for text in large], Tokenizing(None, LONG)),
        }
        for name, (texts, rows, tokenizing) in corpora.items():
            labels = rng.integers(0, MANY_CLASSES, len(texts)).tolist()
            path = Path(parent) / f"{name}.jsonl"
            path.write_text("".join(json.dumps({"input": text, "label": label}) + "\n" for text, label in zip(texts, labels, strict=True)))
            read = trial.corpora.read(CorpusFile(path, MANY_CLASSES), tokenizing)
            yield from same(f"ids of {name} texts", rows, read.rows)
            yield from same(f"labels of {name} texts", labels, read.labels)
        path.write_text((json.dumps({"input": "a" * PIECE, "label": 0}) + "\n") * 64)
        most = trial.corpora.at_once(CorpusFile(path, 1), Tokenizing(None, 16))
        yield value_at_most("characters of long texts that are tokenised at once", most, 2**20 + PIECE)
    yield from _large_ids(trial)
    yield from _beyond_4_gib(trial)
    yield from _longest_line(trial)
    rows = [[trial.seed % 256] * 512] * 2048
    share = trial.corpora.held_by_digest(rows) / (4 * 512 * 2048)
    yield value_at_most("share of a corpus's ids in memory while its digest is taken", share, 0.3)


def _large_ids(trial: Trial) -> Iterator[Comparison]:
    """Ids that take 16 bits and more, as vocabularies of many languages have them, arrive whole, in rows and in batches."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = dict(zip("abcdef", LARGE_IDS, strict=True))
    tokenizer, order = Tokenizer(models.WordLevel(names)), trial.rng("large ids").permutation([*names] * 2)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    texts = [" ".join(order), "a", " ".join(order[::-1])]
    rows = [[names[word] for word in text.split()] for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        file = CorpusFile(Path(folder) / "corpus.jsonl", 2)
        file.path.write_text("".join(json.dumps({"input": text, "label": place % 2}) + "\n" for place, text in enumerate(texts)))
        yield from same("large ids", rows, trial.corpora.read(file, Tokenizing(Path(folder), 16)).rows)
        yield from _padded(trial.corpora.batch(file, Tokenizing(Path(folder), 16), [0, 1, 2]), rows, "right")
        kept = trial.corpora.left_by_a_kill(file, Tokenizing(Path(folder), 16))
        yield from same("temporary files that a kill would leave, and whether the ids are among such files", ([], True), kept)


def _beyond_4_gib(trial: Trial) -> list[Comparison]:
    """Texts behind a billion of tokens, on either side of the place that 32 bits of bytes reach, have their own ids. So have
    texts whose tokens a system takes by a few bytes at a call, and texts that two processes read at once."""
    rng = trial.rng("many tokens")
    rows = [rng.integers(1, 2**20, int(count)).tolist() for count in rng.integers(2, 9, 12)]
    behind = same("ids of texts behind a billion of tokens", rows, trial.corpora.behind(2**30 - 20, rows))
    parts = same("ids on a disk that takes few bytes at a call", rows, trial.corpora.in_parts(rows))
    lost = [
        trial.refuses("ids without room for them", partial(trial.corpora.without_room, [*rows, [1] * 2000]), NO_ROOM, "OSError"),
        trial.refuses("ids that a disk has lost", partial(trial.corpora.of_lost, rows), "tokens of .*corpus", "OSError"),
    ]
    at_once = same("ids that two processes which read at once find otherwise", [0, 0], trial.corpora.by_two_processes(rows))
    return [*behind, *parts, *lost, *at_once]


def _longest_line(trial: Trial) -> list[Comparison]:
    """The longest line that there may be arrives; with a byte more it is refused as the line that it is."""
    with tempfile.TemporaryDirectory() as folder:
        file = CorpusFile(Path(folder) / "corpus.jsonl", 5)
        line = '{{"input": "{}", "label": 1}}'
        longest = LONGEST_LINE - len(line.format(""))
        texts = ("ls", "a" * longest, "a" * (longest + 1))
        ask, found = partial(trial.corpora.load, file), list[Comparison]()
        for end in ("\n", "\r\n"):
            file.path.write_bytes(end.join(map(line.format, (texts[1], texts[0], texts[1]))).encode())  # with an end, and without one
            found += same(f"lengths of the longest texts, {end!r}", [longest, 2, longest], [len(text) for text, _ in ask()])
            file.path.write_bytes(end.join(map(line.format, (*texts[:1] * LINES, *texts[:0:-1]))).encode())
            refused = trial.refuses("a line too long", ask, rf"{file.path.name}:{LINES + 1}: .*{LONGEST_LINE:,}", "ValueError")
            found.append(refused)
        return found


@may_be_non_finite("*.imbalance")
def statistics_are_numpys(trial: Trial) -> Iterator[Comparison]:
    """Totals, samples a class, imbalance, and percentiles of the lengths before truncation are NumPy's of the library's ids.

    This holds of a whole corpus, and of some samples of it, as the parts of a split are; these are in the order in which they were named.
    """
    rng, multi_label = trial.rng("statistics"), trial.seed % 2 == 0
    count = MORE_THAN_A_BYTE if trial.seed % 4 == 0 else int(rng.integers(30, 130))
    also = [20 * SPECIAL, *[VERY_LONG] * (trial.seed % 4 == 1)]
    with written(rng, multi_label=multi_label, count=count, also=also) as corpus, _tokenizer(rng) as (folder, encode, *_):
        tokenizing = Tokenizing(folder, int(rng.integers(2, 60)))
        lengths = np.asarray([max(1, len(encode(text))) for text in corpus.texts])
        count = len(lengths)
        some = rng.permutation(count)[: int(rng.integers(count // 2, count))].tolist()
        whole, part = (trial.corpora.read(corpus.file, tokenizing, places) for places in (None, some))
    named = [[whole.rows[place] for place in some], [whole.labels[place] for place in some]]
    yield from same("samples that are selected", named, [part.rows, part.labels])
    limit, multi_hot = tokenizing.max_seq_len, corpus.multi_hot
    yield from _statistics("whole", whole.statistics, lengths, multi_hot, limit)
    yield from _statistics("selected", part.statistics, lengths[some], multi_hot[some], limit)
    yield from _of_one_sample(trial, multi_label)
    yield from _of_all_samples(trial)
    if trial.seed % 4 == 2:
        yield from _of_many_samples(trial)


def _of_one_sample(trial: Trial, multi_label: bool) -> Iterator[Comparison]:
    """Ids, labels and statistics of a corpus of one line."""
    label: Any = [0, 1, 1] if multi_label else 1
    with tempfile.TemporaryDirectory() as folder:
        file = CorpusFile(Path(folder) / "corpus.jsonl", 3, multi_label)
        file.path.write_text(json.dumps({"input": "ls", "labels" if multi_label else "label": label}) + "\n")
        found = trial.corpora.read(file, Tokenizing(None, 8))
    yield from same("ids and labels of one sample", [[list(b"ls")], [label]], [found.rows, found.labels])
    yield from _statistics("one sample", found.statistics, np.asarray([2]), np.asarray([label if multi_label else [0, 1, 0]]), 8)


def _of_all_samples(trial: Trial) -> Iterator[Comparison]:
    """As many samples as there are, in another order or some of them twice, are those that are named."""
    with tempfile.TemporaryDirectory() as folder:
        file = CorpusFile(Path(folder) / "corpus.jsonl", 3)
        file.path.write_text("".join(json.dumps({"input": "a" * label, "label": label}) + "\n" for label in range(3)))
        for places in ([2, 0, 1], [1, 1, 2], [0, 2, 2]):
            found = trial.corpora.read(file, Tokenizing(None, 8), places)
            rows = [list(b"a" * place) or [found.fill] for place in places]
            yield from same(f"ids and labels of the samples {places} of 3", [rows, places], [found.rows, found.labels])


def _of_many_samples(trial: Trial) -> Iterator[Comparison]:
    """Statistics of more samples of a class than 16 bits count, of which each has another class too; those beyond are the longest."""
    labels = np.eye(3, dtype=np.int64)[np.arange(2**16 + int(trial.rng("many").integers(1000, 1100))) % 2] | [0, 0, 1]
    with tempfile.TemporaryDirectory() as folder:
        file = CorpusFile(Path(folder) / "corpus.jsonl", 3, True)
        lines = [json.dumps({"input": text, "labels": each}) + "\n" for text in ("ls", "ls -la") for each in labels[:2].tolist()]
        file.path.write_text("".join(lines[number % 2 + 2 * (number >= 2**16)] for number in range(len(labels))))
        found = trial.corpora.read(file, Tokenizing(None, 8))
    lengths = np.where(np.arange(len(labels)) < 2**16, 2, 6)
    yield from _statistics("many samples", found.statistics, lengths, labels, 8)


def _statistics(prefix: str, found: Mapping[str, Any], lengths: Array, multi_hot: Array, limit: int) -> list[Comparison]:
    counts = multi_hot.sum(axis=0)
    expected = {
        "total": len(lengths),
        "class_counts": tuple(counts.tolist()),
        "length_percentiles": {percent: int(np.percentile(lengths, percent, method="inverted_cdf")) for percent in PERCENTILES},
        "max_length": int(lengths.max()),
        "truncated": int(np.sum(lengths > limit)),
        "minority": int(counts.min()),
        "imbalance": float(counts.max() / counts.min()) if counts.min() else float("inf"),
    }
    return same(prefix, expected, found)


def batches_are_padded_and_masked(trial: Trial) -> list[Comparison]:
    """Each row holds its ids on the side away from the padding, its mask is true there and nowhere else, and its label is its own.

    The same from raw text. Ids that happen to equal the padding id are real tokens. Samples are named by a list, a tuple, an array, or by a
    range that leaves some out or goes backwards.
    """
    rng = trial.rng("batch")
    multi_label, side = bool(rng.random() < 0.5), str(rng.choice(["left", "right"]))
    with written(rng, multi_label=multi_label) as corpus, _tokenizer(rng) as (folder, encode, around, fill):
        limit = _limit(rng, around)
        places: Sequence[int] = [0, *(int(i) for i in rng.permutation(len(corpus.texts))[: int(rng.integers(1, 6))])]
        every = range(len(corpus.texts))
        places = [places, every[:: -1 - trial.seed % 2], every[1::2] or every][int(rng.integers(3))]
        mixed = [0, *(1 + rng.permutation(len(every) - 2)).tolist(), every[-1]]  # as many tokens as there are from the first to the last
        compared = list[Comparison]()
        forms: list[Any] = [places, tuple(places), np.asarray(places), mixed]
        for named in forms:
            found = trial.corpora.batch(corpus.file, Tokenizing(folder, limit, side), named)
            rows = [_kept(encode(corpus.texts[place]), limit, around, fill) for place in named]
            labels = np.asarray([corpus.expected_labels[place] for place in named], np.float32 if multi_label else np.int64)
            compared += [*_padded(found, rows, side), *same("labels", labels, found.labels)]
            compared += same("dtype of the labels", str(labels.dtype), str(found.labels.dtype))
    return compared


def _padded(found: Batch, rows: list[list[int]], side: str) -> Iterator[Comparison]:
    """Mask and ids at the mask, of the batch from token ids and of the one from raw text."""
    lengths = np.asarray([len(row) for row in rows])
    columns = np.arange(lengths.max())
    mask = columns < lengths[:, None] if side == "right" else columns >= lengths.max() - lengths[:, None]
    for name, ids, given in (("", found.input_ids, found.mask), ("raw ", found.raw_input_ids, found.raw_mask)):
        yield from same(f"{name}mask", mask, given)
        yield from same(f"{name}input_ids", np.concatenate(rows), ids[mask] if ids.shape == mask.shape else ids)
