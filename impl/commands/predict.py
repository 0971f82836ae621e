"""Classes and probabilities of texts, one JSON object a line: {"input", "label", "probabilities"}, with several labels a text "labels"."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, nullcontext
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

from blackswan.impl import strict_json
from blackswan.impl.commands.common import BadInput, add_adapter_options, open_saved
from blackswan.impl.folder import naming
from blackswan.impl.strict_json import require_text

if TYPE_CHECKING:
    from blackswan.impl.pipeline import ClassifyPipeline

IN_MEMORY = 2**16
"""Bytes of texts that are kept in memory until all are read."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_adapter_options(parser, required=False)
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts to classify")
    parser.add_argument("--corpus", metavar="FILE", type=Path, help="JSONL file whose lines have an `input`; labels are not read")
    parser.add_argument("--input", metavar="FILE", help="text file, one text a line; - is standard input")


def run(options: argparse.Namespace) -> None:
    """Prints a line for each text, in their order, once all of them were read: bad input prints nothing."""
    given = [bool(options.texts), options.corpus is not None, options.input is not None]
    if sum(given) != 1:
        raise BadInput("what is to be classified? expected exactly one of TEXT…, --corpus FILE and --input FILE")
    texts: Iterator[str]
    if options.texts:
        texts = (_text(text) for text in options.texts)
    else:
        texts = _lines(options.input) if options.corpus is None else _corpus(options.corpus)
    with _kept(texts) as kept:
        pipeline = open_saved(options)
        for line in predictions(pipeline, map(json.loads, kept)):
            print(line)


def _kept(texts: Iterable[str]) -> IO[bytes]:
    """A line of JSON for each text: in memory, for there may be no folder for temporary files, and of many texts in such a file."""
    lines, few = (json.dumps(text).encode() + b"\n" for text in texts), BytesIO()
    for line in lines:
        few.write(line)
        if few.tell() > IN_MEMORY:
            break
    else:
        few.seek(0)
        return few
    with naming(Path(tempfile.gettempdir())), ExitStack() as writing:  # to close it fails as well where the disk is full
        kept = writing.enter_context(tempfile.TemporaryFile("w+b"))
        kept.write(few.getvalue())
        kept.writelines(lines)
        kept.flush()
        writing.pop_all()
    kept.seek(0)
    return kept


def predictions(pipeline: "ClassifyPipeline", texts: Iterable[str]) -> Iterator[str]:
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


def _lines(name: str) -> Iterator[str]:
    """The lines of a text file, or for - of standard input, without their ends (LF or CRLF, and nothing else)."""
    for where, line in _numbered(name, "a text file, one text a line"):
        try:
            yield (line[:-2] if line.endswith(b"\r\n") else line.removesuffix(b"\n")).decode()
        except UnicodeDecodeError as error:
            raise BadInput(f"{where}: is not UTF-8: byte 0x{line[error.start]:02x}") from None


def _corpus(path: Path) -> Iterator[str]:
    for where, line in _numbered(str(path), "a JSONL file"):
        try:
            value = strict_json.loads(line)
            text = value.get("input") if isinstance(value, dict) else None
            if not isinstance(text, str):
                raise ValueError("expected a JSON object with a text `input`")
            require_text(text)
        except ValueError as error:
            raise BadInput(f"{where}: {error}") from None
        yield text


def _numbered(name: str, expected: str) -> Iterator[tuple[str, bytes]]:
    """Each line of a file, or for - of standard input, and where it is; one line is held at a time."""
    from blackswan.impl.corpus import lines_of

    shown = "standard input" if name == "-" else name
    if name == "-" and sys.stdin is None:
        raise BadInput(f"{shown}: is closed; expected {expected}")
    try:
        with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as file:
            for number, line in enumerate(lines_of(file, shown), start=1):
                yield f"{shown}:{number}", line
    except OSError as error:
        raise BadInput(f"{shown}: {(error.strerror or str(error)).lower()}; expected {expected}") from None
