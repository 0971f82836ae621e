"""What options of `python -m falsifiers` may be."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path


def positive(text: str) -> int:
    """A whole number from 1 on. ArgumentTypeError, which argparse shows as it is."""
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def json_lines(option: str, path: Path, keys: Sequence[str]) -> None:
    """ValueError where JSON lines cannot be written to a file, or it holds something else than lines that have these keys."""
    if not path.parent.is_dir():
        raise ValueError(f"{option}: there is no folder {path.parent} to write {path.name} into")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"{option}: {path} cannot be written; expected a file in a folder that can be written to")
    if path.is_file() and not _holds(path, keys):
        raise ValueError(f"{option}: {path} holds something else than this command writes; expected a new file, or one that it has written")


def _holds(path: Path, keys: Sequence[str]) -> bool:
    with path.open("rb") as stream:
        first = stream.readline()
    try:
        line = json.loads(first or "null")
    except (ValueError, RecursionError):
        return False
    return not first or (isinstance(line, dict) and set(keys) <= set(line))
