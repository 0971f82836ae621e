"""Adapters, merged checkpoints and saved checkpoints, as a subject runs them: paths and settings in, arrays out."""

import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from blackswan.impl import adapter, checkpoint, merge
from blackswan.impl.classifier import Adaptation, Classifier
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]
Outputs = dict[str, Array]
WRITES = (
    "tempfile.mkdtemp",
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.chmod",
    "shutil.rmtree",
    "shutil.copyfile",
    "ctypes.dlsym",
)
LATE, KILLED = 30, 9


def save(scalars: Scalars, device: torch.device) -> Outputs:
    """Saves the tensors of `trainable`, from the device, as an adapter of the checkpoint `base` in `folder`."""
    tensors = {name: tensor.to(device) for name, tensor in load_file(scalars["trainable"]).items()}
    _save(scalars, tensors)
    return {"saved": np.asarray(len(tensors))}


def load(scalars: Scalars, device: torch.device) -> Outputs:
    """The tensors of the adapter in `folder`, its rank and alpha, and the index of its pooling."""
    del device
    found = _loaded(scalars)
    settings = found.adaptation
    numbers = {"rank": settings.rank, "alpha": settings.alpha, "classes": settings.classes, "nf4": settings.nf4}
    numbers["pooling"] = ("mean", "last", "first").index(settings.pooling)
    return {name: np.asarray(value) for name, value in numbers.items()} | _arrays(found.trainable, "trainable/")


def forward(scalars: Scalars, device: torch.device) -> Outputs:
    """Logits of the checkpoint `base` with the adapter in `folder`, loaded from there, in float32."""
    base = checkpoint.load_checkpoint(Path(scalars["base"]))
    return _logits(base, adapter.load_adapter(Path(scalars["folder"]), base.config), scalars, device)


def merged(scalars: Scalars, device: torch.device) -> Outputs:
    """Merges the adapter in `folder`, trained in the dtype `trained_in`, into the checkpoint `base`, as a checkpoint in `merged`."""
    del device
    base, trained_in = Path(scalars["base"]), scalars.get("trained_in")
    options = {"quantized_as": getattr(torch, trained_in)} if trained_in else {}
    merge.save_merged(Path(scalars["merged"]), checkpoint.load_checkpoint(base), _loaded(scalars), source=base, **options)
    return {"saved": np.asarray(1)}


def merged_forward(scalars: Scalars, device: torch.device) -> Outputs:
    """Logits of the merged checkpoint in `folder`, in float32."""
    base, head = merge.load_merged(Path(scalars["folder"]))
    return _logits(base, head, scalars, device)


def save_checkpoint(scalars: Scalars, device: torch.device) -> Outputs:
    """Copies the checkpoint `base` to `folder` through the device, and loads the copy."""
    base = checkpoint.load_checkpoint(Path(scalars["base"]))
    there = {name: tensor.to(device) for name, tensor in base.tensors.items()}
    checkpoint.save_checkpoint(Path(scalars["folder"]), base.config, there)
    return _arrays(checkpoint.load_checkpoint(Path(scalars["folder"])).tensors, "parameters/")


def interrupted(scalars: Scalars, device: torch.device) -> Outputs:
    """Saves as `save` does in a process that is killed at its `at`-th step in the file system, or cannot write files over `limit` bytes."""
    del device
    tensors = load_file(scalars["trainable"])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(LATE)
            _limit(scalars)
            _save(scalars, tensors)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise TimeoutError(f"the save was still running after {LATE} s")
    return {"status": np.asarray(os.WEXITSTATUS(status))}


def _limit(scalars: Scalars) -> None:
    if "limit" in scalars:
        resource.setrlimit(resource.RLIMIT_FSIZE, (scalars["limit"], scalars["limit"]))
        return
    left = scalars["at"]

    def killed(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in WRITES or (event == "open" and len(arguments) > 1 and arguments[1] not in (None, "r", "rb")):
            left -= 1
            if left < 0:
                os._exit(KILLED)

    sys.addaudithook(killed)


def _save(scalars: Scalars, tensors: Mapping[str, torch.Tensor]) -> None:
    base = Path(scalars["base"])
    settings = {name: scalars[name] for name in ("classes", "rank", "alpha", "targets", "pooling", "nf4")}
    adapter.save_adapter(
        Path(scalars["folder"]), checkpoint.read_config(base), Adaptation(**settings), tensors, base=base, extra={"max_seq_len": 64}
    )


def _loaded(scalars: Scalars) -> adapter.Adapter:
    return adapter.load_adapter(Path(scalars["folder"]), checkpoint.read_config(Path(scalars["base"])))


def _logits(base: checkpoint.Checkpoint, found: adapter.Adapter, scalars: Scalars, device: torch.device) -> Outputs:
    classifier = Classifier(base.config, found.adaptation, base.tensors, found.trainable, dtype=torch.float32, device=device)
    tokens = {name: torch.tensor(scalars[name], device=device) for name in ("input_ids", "mask")}
    with torch.no_grad():
        return {"logits": classifier(tokens["input_ids"], tokens["mask"]).cpu().numpy()}


def _arrays(tensors: Mapping[str, torch.Tensor], prefix: str) -> Outputs:
    """The tensors on the host; bfloat16 in float32, which holds it exactly, under a name that says so."""
    found = {}
    for name, tensor in tensors.items():
        narrow = tensor.dtype == torch.bfloat16
        found[f"{prefix}{name}"] = (tensor.float() if narrow else tensor).cpu().numpy()
        found[f"bfloat16/{name}"] = np.asarray(narrow)
    return found


PROCEDURES: dict[str, Callable[[Scalars, torch.device], Outputs]] = {
    "save_adapter": save,
    "load_adapter": load,
    "adapter_forward": forward,
    "merge_adapter": merged,
    "merged_forward": merged_forward,
    "save_checkpoint": save_checkpoint,
    "interrupted_save": interrupted,
}
