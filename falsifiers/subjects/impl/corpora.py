"""Corpora and the plan of an epoch, as `impl` reads and makes them."""

from collections.abc import Sequence

import torch

from blackswan.falsifiers.subjects.doors import Batch, CorpusFile, Label, Split, Statistics, Tokenizing, TokenRows
from blackswan.impl import corpus as corpora
from blackswan.impl import samples, tokens


class Corpora:
    """See `doors.Corpora`."""

    def __init__(self, device: torch.device, path: str | None) -> None:
        del path
        self._device = device

    def load(self, corpus: CorpusFile) -> list[tuple[str, Label]]:
        """Texts and labels."""
        return [(sample.text, _label(sample.label)) for sample in corpora.load_corpus(corpus.path, corpus.classes, corpus.multi_label)]

    def read(self, corpus: CorpusFile, tokenizing: Tokenizing, places: Sequence[int] | None = None) -> TokenRows:
        """Token ids and statistics."""
        tokenizer = _tokens(tokenizing)
        found = _samples(corpus, tokenizer)
        found = found if places is None else found.select(places)
        said = found.statistics()
        statistics = Statistics(**{name: getattr(said, name) for name in Statistics.__dataclass_fields__})
        rows = [list(row) for row in found.rows]
        return TokenRows(rows, _labels(found), statistics, tokenizer.fill, tokenizer.vocab, tokenizer.description)

    def batch(self, corpus: CorpusFile, tokenizing: Tokenizing, places: Sequence[int]) -> Batch:
        """A batch, tokenised before and from raw text."""
        tokenizer = _tokens(tokenizing)
        found = _samples(corpus, tokenizer).batch(places, tokenizer, self._device)
        texts = [text for text, _ in self.load(corpus)]
        raw = tokenizer.batch([texts[place] for place in places])
        return Batch(*(value.cpu().numpy() for value in (found.input_ids, found.mask, found.labels, *raw)))

    def epoch_order(self, count: int, seed: int, epoch: int) -> list[int]:
        """The order of an epoch."""
        return list(samples.epoch_order(count, seed, epoch))

    def effective_batches(self, order: Sequence[int], size: int) -> list[list[int]]:
        """The samples of each optimiser step."""
        return [list(batch) for batch in samples.effective_batches(order, size)]

    def split(self, labels: Sequence[Label], classes: int, fraction: float, seed: int) -> Split:
        """The two parts; each sample's one token is its place in the corpus."""
        training, validation = samples.split_validation(_numbered(labels, classes), fraction, seed)
        return Split(_places(training), _places(validation), _labels(training), _labels(validation))

    def balanced_weights(self, labels: Sequence[Label], classes: int) -> list[float]:
        """Balanced class weights."""
        return [float(weight) for weight in samples.balanced_weights(_numbered(labels, classes))]


def _places(part: samples.Samples) -> list[int]:
    return [row[0] for row in part.rows]


def _labels(part: samples.Samples) -> list[Label]:
    return [_label(target) for target in part.targets]


def _label(label: corpora.Label) -> Label:
    return list(label) if isinstance(label, tuple) else label


def _tokens(tokenizing: Tokenizing) -> tokens.Tokens:
    limit, side = tokenizing.max_seq_len, tokenizing.padding_side
    return tokens.load_tokenizer(tokenizing.tokenizer, limit, side) if tokenizing.tokenizer else tokens.ByteTokens(limit, side)


def _samples(corpus: CorpusFile, tokenizer: tokens.Tokens) -> samples.Samples:
    return samples.read_samples(corpus.path, tokenizer, corpus.classes, corpus.multi_label)


def _numbered(labels: Sequence[Label], classes: int) -> samples.Samples:
    """Samples whose one token is their place in the corpus."""
    targets = tuple(tuple(label) if isinstance(label, list) else label for label in labels)
    return samples.Samples(tuple((index,) for index in range(len(labels))), targets, classes, isinstance(targets[0], tuple))
