"""Classes and probabilities of texts, one JSON object a line: {"input", "label", "probabilities"}, with several labels a text "labels"."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from blackswan.impl.commands.common import BadInput, add_adapter_options, open_saved

if TYPE_CHECKING:
    from blackswan.impl.pipeline import ClassifyPipeline


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_adapter_options(parser, required=False)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts to classify")
    parser.add_argument("--corpus", metavar="FILE", type=Path, help="JSONL file whose lines have an `input`; labels are not read")
    parser.add_argument("--input", metavar="FILE", help="text file, one text a line; - is standard input")


def run(options: argparse.Namespace) -> None:
    """Prints a line for each text, in their order."""
    given = [bool(options.texts), options.corpus is not None, options.input is not None]
    if sum(given) != 1:
        raise BadInput("what is to be classified? expected exactly one of TEXT…, --corpus FILE and --input FILE")
    if options.texts:
        texts = [_text(text) for text in options.texts]
    elif options.corpus is not None:
        texts = list(_corpus(options.corpus))
    else:
        texts = _lines(options.input)
    pipeline = open_saved(options)
    for line in predictions(pipeline, texts):
        print(line, flush=options.input == "-")


def predictions(pipeline: "ClassifyPipeline", texts: Sequence[str]) -> Iterator[str]:
    """One JSON text for each text."""
    remaining = iter(texts)
    while batch := list(islice(remaining, pipeline.config.batch_size)):
        classes, probabilities = pipeline.answers(batch)
        name = "labels" if pipeline.config.multi_label else "label"
        for text, found, row in zip(batch, classes, probabilities.tolist(), strict=True):
            yield json.dumps({"input": text, name: found, "probabilities": row})


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # what the shell passed was not UTF-8
        raise BadInput(f"TEXT {text!r} is not UTF-8") from None
    return text


def _lines(name: str) -> list[str]:
    content = sys.stdin.buffer.read() if name == "-" else _content(Path(name), "a text file, one text a line")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        shown = "standard input" if name == "-" else name
        raise BadInput(f"{shown}:{content[: error.start].count(10) + 1}: is not UTF-8: byte 0x{content[error.start]:02x}") from None
    lines = text.split("\n")
    return lines[:-1] if lines[-1] == "" else lines


def _content(path: Path, expected: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: {(error.strerror or str(error)).lower()}; expected {expected}") from None


def _corpus(path: Path) -> Iterator[str]:
    from blackswan.impl import strict_json

    for number, line in enumerate(_content(path, "a JSONL file").removesuffix(b"\n").split(b"\n"), start=1):
        try:
            value = strict_json.loads(line)
            text = value.get("input") if isinstance(value, dict) else None
            if not isinstance(text, str):
                raise ValueError("expected a JSON object with a text `input`")
            text.encode()
        except ValueError as error:
            raise BadInput(f"{path}:{number}: {error}") from None
        yield text
