"""Corpora read back: every text and label exactly, and bad lines refused."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from blackswan.falsifiers.data import CLASSES, CORPUS_HELDOUT, CORPUS_TRAIN
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.refusals import refusal
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.generators import generator_for
from blackswan.falsifiers.system.written import equal, renamed, written
from blackswan.reference.table import Array


def corpus_arrives_exactly(attack: Attack, case: Case) -> list[Comparison]:
    """Texts and labels of a written corpus, byte for byte, in their order; and of the shipped ones, read by `json` alone."""
    return _arrives(attack, case, multi_label=False) + _shipped(attack, case)


def multi_label_corpus_arrives_exactly(attack: Attack, case: Case) -> list[Comparison]:
    """Lists of 0 and 1 as they stand, single labels as the list with one 1."""
    return _arrives(attack, case, multi_label=True)


def _arrives(attack: Attack, case: Case, *, multi_label: bool) -> list[Comparison]:
    with written(generator_for(case.seed, "corpus"), multi_label=multi_label) as corpus:
        answer = attack.answer(case, scalars=corpus.scalars)
    return equal(answer, labels=corpus.expected_labels, **_bytes(corpus.texts))


def _bytes(texts: Sequence[str]) -> dict[str, Array]:
    encoded = [text.encode() for text in texts]
    return {"text": np.frombuffer(b"".join(encoded), np.uint8), "text_bytes": np.asarray([len(text) for text in encoded])}


def _shipped(attack: Attack, case: Case) -> list[Comparison]:
    path = (CORPUS_TRAIN, CORPUS_HELDOUT)[case.seed % 2]
    rows = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
    answer = attack.answer(case, scalars={"path": str(path), "classes": len(CLASSES), "multi_label": False})
    return equal(answer, labels=[row["label"] for row in rows], **_bytes([row["input"] for row in rows]))


BAD_LABELS: dict[str, tuple[str, str]] = {
    "list too short": ('"labels": [1, 0]', "labels"),
    "list too long": ('"labels": [1, 0, 0, 0]', "labels"),
    "empty list": ('"labels": []', "labels"),
    "no list": ('"labels": "100"', "labels"),
    "number instead of a list": ('"labels": 1', "labels"),
    "null": ('"labels": null', "labels"),
    "two": ('"labels": [1, 0, 2]', "labels"),
    "minus one": ('"labels": [1, 0, -1]', "labels"),
    "half": ('"labels": [1, 0, 0.5]', "labels"),
    "one as a float": ('"labels": [1.0, 0, 0]', "labels"),
    "truth": ('"labels": [true, 0, 0]', "labels"),
    "text in the list": ('"labels": ["1", 0, 0]', "labels"),
    "nested list": ('"labels": [[1, 0, 0]]', "labels"),
    "label and labels": ('"label": 0, "labels": [1, 0, 0]', "label"),
    "single label out of range": ('"label": 3', "label"),
    "single label as a float": ('"label": 1.0', "label"),
    "single label as truth": ('"label": true', "label"),
    "list as the single label": ('"label": [1, 0, 0]', "label"),
}


def refuses_multi_label_corpus(attack: Attack, case: Case) -> list[Comparison]:
    """One damaged line among good ones, file and line in the message; and a list where one label a sample was asked for."""
    rng = generator_for(case.seed, "damage")
    good = ['{"input": "ls", "labels": [0, 1, 1]}', '{"input": "", "label": 2}', '{"input": "id", "labels": [0, 0, 0]}'] * 3
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.jsonl"

        def refused(name: str, lines: list[str], at: int, message: str, multi_label: bool) -> None:
            path.write_text("\n".join(lines))
            scalars = {"path": str(path), "classes": 3, "multi_label": multi_label}
            found.append(
                renamed(name, refusal(lambda: attack.answer(case, scalars=scalars), "ValueError", f"{path.name}:{at + 1}: .*{message}"))
            )

        for name, (label, message) in BAD_LABELS.items():
            at = int(rng.integers(0, len(good) + 1))
            refused(name, [*good[:at], f'{{"input": "rm", {label}}}', *good[at:]], at, message, True)
        at = int(rng.integers(0, 5))
        single = [f'{{"input": "ls", "label": {index % 3}}}' for index in range(at)]
        refused("several labels, one asked for", [*single, good[0]], at, "one label", False)
    return found
