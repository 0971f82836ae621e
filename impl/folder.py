"""Folders that are whole or absent, written beside under another name, then renamed; and folders that one process writes at a time."""

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
PARTIAL, LOCK = ".partial-", ".lock"
_OLD = ".old"
_TAKEN = f".abcdefgh{_OLD}"
"""As the name of a folder ends that was taken away."""
_LONGEST = 255 - len("abcdefgh.old")
"""Bytes of a name, of which file systems take 255, to which others are added."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""What a disk says that is full, over its quota, limited in the size of files, broken or not to be written."""


class InUseError(ValueError):
    """Another process writes the folder now."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Inside, no other process writes the folder, which is made if it is not there; what a killed writer left half done is removed first.

    The lock is the operating system's: it ends with its process, however that ends. A process may enter several times. Raises an
    InUseError where another one is inside.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK, timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except Timeout:
        raise InUseError(f"{folder}: another process is writing it; wait for its end, or choose another folder") from None
    try:
        remove_left_over(folder, PARTIAL)
        yield
    finally:
        lock.release()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of the disk inside is an OSError that names the path, also where a library raises an error of its own for it."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        from safetensors import SafetensorError  # here: commands import this module for their help too

        code = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def remove_left_over(folder: Path, prefix: str) -> None:
    """Removes files and folders of that prefix which a killed process left half done; those that one still writes are locked by it.

    A folder that it had taken away, and had not yet replaced, gets its name again, or the digest of one that is too long.
    """
    for path in [each for each in folder.iterdir() if each.name.startswith(prefix)]:  # no pattern: a name may hold brackets
        if not path.is_dir():
            path.unlink(missing_ok=True)
            continue
        with suppress(OSError), _locked(path):
            place = folder / path.name.removeprefix(PARTIAL)[: -len(_TAKEN)]
            if path.name.endswith(_OLD) and place != folder and not is_there(place):
                path.rename(place)
            else:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The operating system's lock on a folder, which ends with its process. A BlockingIOError where another process has it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextmanager
def whole_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder to write into; it gets its name when the block ends without an error, and is removed when it ends with one.

    With `replace` an existing folder of that name changes places with the new one in one step where the system can exchange two names
    (Linux), else by two renames; where the name is a link, what it leads to is replaced. Without `replace` a FileExistsError where the
    name is there, at the beginning or at the end.
    """
    folder = folder.resolve() if replace else folder
    if not (replace and folder.is_dir()):
        _require_free(folder)
    with _partial(folder) as partial:
        yield partial
        _settle(partial)
        if not replace:
            _require_free(folder)
        _put(partial, folder)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A new folder for a file and what belongs beside it; they move beside each other to where `path` is, `path` itself last.

    They do so when the block ends without an error, and are removed when it ends with one. A FileExistsError where `path` exists, or at
    the end another one of them.
    """
    _require_free(path)
    with _partial(path) as partial:
        yield partial
        _settle(partial)
        written = sorted(partial.iterdir(), key=lambda each: each.name == path.name)
        for each in written:
            _require_free(path.with_name(each.name))
        for each in written:
            each.rename(path.with_name(each.name))


def is_there(path: Path) -> bool:
    """Whether a name is in use, also as a link to what is not there."""
    return path.exists() or path.is_symlink()


def _require_free(path: Path) -> None:
    if is_there(path):
        raise FileExistsError(f"{path} exists; choose another name or move it away")


def _prefix(name: str) -> str:
    """How the names of parts of `name` begin; of one that is too long to be part of another, a digest stands for it."""
    prefix = f"{PARTIAL}{name}."
    return prefix if len(os.fsencode(prefix)) <= _LONGEST else f"{PARTIAL}{hashlib.sha256(os.fsencode(name)).hexdigest()}."


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A folder beside `target`, locked while it is written, removed afterwards with what is still in it.

    Folders above it that are not there are made, and go again where nothing has come into them.
    """
    above = [each for each in target.parents if not each.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = _prefix(target.name)
        remove_left_over(target.parent, prefix)
        partial = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            with _locked(partial), naming(target):
                yield partial
            flush(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        for each in above:
            with suppress(OSError):
                each.rmdir()


def _settle(partial: Path) -> None:
    """What was written is on the disk, and may be read by everybody: some libraries write files that only their owner may read."""
    for path in [*partial.rglob("*"), partial]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        flush(path)


def _put(new: Path, folder: Path) -> None:
    """Gives `new` the name `folder`; what had it is afterwards called `new`, or is gone."""
    if not folder.exists():
        new.rename(folder)
    elif not _exchange(new, folder):
        old = new.with_name(f"{new.name}{_OLD}")
        folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            old.rename(folder)
            raise
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


def flush(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)
