"""Folders that are whole or absent: written beside under another name, then renamed."""

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def whole_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder to write into; it gets its name when the block ends without an error, and is removed when it ends with one.

    With `replace` an existing folder of that name changes places with the new one in one step where the system can exchange two names
    (Linux), else by two renames. A FileExistsError where it exists and `replace` is not given.
    """
    if folder.exists() and not (replace and folder.is_dir()):
        raise FileExistsError(f"{folder} exists; choose another name or move it away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        for path in [*partial.rglob("*"), partial]:
            _flush(path)
        _put(partial, folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put(new: Path, folder: Path) -> None:
    """Gives `new` the name `folder`; what had it is afterwards called `new`, or is gone."""
    if not folder.exists():
        new.rename(folder)
    elif not _exchange(new, folder):
        old = new.with_name(f"{new.name}.old")
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step (renameat2, Linux 3.15); False where the system or its file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _flush(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
