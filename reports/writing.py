"""Files that appear whole or not at all."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def write_all(contents: Mapping[Path, str]) -> None:
    """Writes every text to a temporary file beside its place, then moves all into place.

    Raises:
        OSError: a folder or file cannot be written; no file was replaced unless the fault struck between two moves.
    """
    written: list[tuple[Path, Path]] = []
    try:
        for path, text in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            written.append((Path(name), path))
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            Path(name).chmod(0o644)
        for temporary, path in written:
            temporary.replace(path)
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
