"""Parts of files that are read when they are asked for, while the files stay what they were when their headers were read."""

from pathlib import Path

import torch
from torch import Tensor

FileState = tuple[int, int]


def state_of(path: Path) -> FileState:
    """A file's size in bytes and the time of its last change."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def read_span(file: Path, start: int, length: int, state: FileState) -> Tensor:
    """The bytes of a file from `start` on, uint8 [length], in memory of their own.

    Raises a ValueError where the file has changed since `state`.
    """
    content = torch.empty(length, dtype=torch.uint8, device="cpu")
    try:
        with file.open("rb") as opened:
            opened.seek(start)
            whole = opened.readinto(content.numpy().data) == length and state_of(file) == state
    except FileNotFoundError:
        whole = False
    if not whole:
        raise ValueError(f"{file}: changed since its header was read; leave it alone until the model is loaded, and start again")
    return content
