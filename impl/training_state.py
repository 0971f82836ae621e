"""The resume state of a run: one file, which is the old one or the new one whenever the process dies, and never a mixture."""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from blackswan.impl import strict_json
from blackswan.impl.folder import PARTIAL, flush, naming

STATE_FILE = "state.safetensors"
VERSION = 1


@dataclass(frozen=True)
class Progress:
    """Where a run stands. All randomness is a function of seed and epoch, so that no generator's state belongs to it.

    `step` optimiser steps have been made, `position` of them in epoch `epoch` (from 0), with `loss_sum` over `sample_count` samples.
    `best_loss` is the lowest validation loss of `best_epoch` (None: none yet), after which `stale_epochs` were no better. `records` are
    the finished epochs, `run` names the run that the state belongs to, and `finished` that nothing is left to do.
    """

    run: str
    step: int = 0
    epoch: int = 0
    position: int = 0
    loss_sum: float = 0.0
    sample_count: int = 0
    epoch_seconds: float = 0.0
    best_loss: float | None = None
    best_epoch: int | None = None
    stale_epochs: int = 0
    finished: bool = False
    records: tuple[dict[str, Any], ...] = ()


def save_state(folder: Path, progress: Progress, tensors: Mapping[str, Tensor]) -> None:
    """Replaces the state in the folder, which is made if it is not there. When this returns, the new state survives a power failure.

    Raises an OSError where the file cannot be written (no space, no permission); the old state is still there then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"version": VERSION, **dataclasses.asdict(progress)})
    write_atomically(folder / STATE_FILE, save(host, metadata={"progress": text, "sha256": _digest(text, host)}))


def load_state(folder: Path) -> tuple[Progress, dict[str, Tensor]] | None:
    """The state in the folder, on the CPU; None where none was ever written. Raises a ValueError for a damaged one."""
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()  # safe_open takes no path that is not UTF-8
        tensors = load(content)
        header = strict_json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from None
    metadata = header.get("__metadata__") or {}
    text = metadata.get("progress", "")
    if metadata.get("sha256") != _digest(text, tensors):
        raise _damaged(path, "its content does not match its checksum")
    return _progress(strict_json.loads(text), path), tensors


def _progress(values: Any, path: Path) -> Progress:
    """Raises a ValueError for a state of another version, and for a key that is missing, unknown or of another type."""
    version = values.pop("version", None) if isinstance(values, dict) else None
    if type(version) is not int or version != VERSION:
        raise ValueError(f"{path}: a state of version {version}; this program reads version {VERSION}")
    kinds = {name: {*(get_args(hint) or (hint,))} for name, hint in get_type_hints(Progress).items()}
    for name in sorted(kinds.keys() ^ values.keys()):
        raise _damaged(path, f"its {name} is {'missing' if name in kinds else 'unknown'}")
    for name, value in values.items():
        if name != "records" and type(value) not in kinds[name]:
            raise _damaged(path, f"its {name} is {value!r}")
    if not isinstance(values["records"], list) or not all(isinstance(record, dict) for record in values["records"]):
        raise _damaged(path, "its records are no list of epochs")
    return Progress(**{**values, "records": tuple(values["records"])})


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces a file by way of a temporary one beside it: a reader, and whoever comes after a crash, sees the old or the new one whole."""
    descriptor, name = tempfile.mkstemp(prefix=f"{PARTIAL}{path.name}.", dir=path.parent)
    partial = Path(name)
    try:
        with naming(path), os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    flush(path.parent)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{path}: damaged ({why}); remove it to start again from the beginning, or restore it from a copy")
