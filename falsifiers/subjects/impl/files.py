"""Adapters, merged checkpoints and saved checkpoints, as `impl` writes and reads them."""

import os
import resource
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from blackswan.falsifiers.subjects.doors import AdapterSettings, LoadedAdapter
from blackswan.falsifiers.subjects.tensors import to_numpy
from blackswan.impl import adapter, checkpoint, merge, tokens
from blackswan.impl.classifier import Adaptation, Classifier
from blackswan.reference.table import Array

WRITES = {
    *("tempfile.mkdtemp", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"),
    *("shutil.rmtree", "shutil.copyfile", "ctypes.dlsym"),
}
"""Audited events by which a process changes files, beside opening one to write; two folders change places through ctypes."""
LATE, KILLED = 30, 9


class Files:
    """See `doors.Files`."""

    def __init__(self, device: torch.device, path: str | None) -> None:
        del path
        self._device = device

    def save_adapter(self, folder: Path, base: Path, settings: AdapterSettings, tensors: Mapping[str, Array]) -> None:
        """Saves an adapter from the device."""
        held = {name: torch.tensor(value, device=self._device) for name, value in tensors.items()}
        _save(folder, base, settings, held)

    def interrupted_save(
        self,
        folder: Path,
        base: Path,
        settings: AdapterSettings,
        tensors: Mapping[str, Array],
        *,
        step: int | None = None,
        limit: int | None = None,
    ) -> None:
        """Saves an adapter in a process that does not get to its end."""
        held = {name: torch.tensor(value) for name, value in tensors.items()}
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(LATE)
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                if step is not None:
                    _kill_at(step)
                _save(folder, base, settings, held)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            raise TimeoutError(f"the save was still running after {LATE} s")

    def load_adapter(self, folder: Path, base: Path) -> LoadedAdapter:
        """An adapter as it arrives."""
        found = adapter.load_adapter(folder, checkpoint.read_config(base))
        settings = {name: getattr(found.adaptation, name) for name in AdapterSettings.__dataclass_fields__}
        return LoadedAdapter(AdapterSettings(**settings), _arrays(found.trainable))

    def adapter_logits(self, folder: Path, base: Path, input_ids: Array, mask: Array) -> Array:
        """Logits of the checkpoint with the adapter."""
        loaded = checkpoint.load_checkpoint(base)
        return self._logits(loaded, adapter.load_adapter(folder, loaded.config), input_ids, mask)

    def merge(self, folder: Path, base: Path, merged: Path, trained_in: str | None = None) -> None:
        """Merges an adapter into its checkpoint."""
        options = {"quantized_as": getattr(torch, trained_in)} if trained_in else {}
        loaded = checkpoint.load_checkpoint(base)
        merge.save_merged(merged, loaded, adapter.load_adapter(folder, loaded.config), source=base, **options)

    def merged_logits(self, folder: Path, input_ids: Array, mask: Array) -> Array:
        """Logits of a merged checkpoint."""
        return self._logits(*merge.load_merged(folder), input_ids, mask)

    def copy_checkpoint(self, base: Path, folder: Path) -> Mapping[str, Array]:
        """A checkpoint saved from the device, and loaded again."""
        loaded = checkpoint.load_checkpoint(base)
        there = {name: tensor.to(self._device) for name, tensor in loaded.tensors.items()}
        checkpoint.save_checkpoint(folder, loaded.config, there)
        return _arrays(checkpoint.load_checkpoint(folder).tensors)

    def load_decoder(self, folder: Path) -> Mapping[str, Array]:
        """The parameters of a checkpoint's decoder."""
        dtype = next(iter(checkpoint.load_checkpoint(folder).tensors.values())).dtype
        return _arrays(dict(checkpoint.load_decoder(folder, dtype=dtype, device=self._device).named_parameters()))

    def load_tokenizer(self, folder: Path) -> int:
        """The number of ids of a checkpoint's tokenizer."""
        return tokens.load_tokenizer(folder, 16).vocab

    def _logits(self, base: checkpoint.Checkpoint, found: adapter.Adapter, input_ids: Array, mask: Array) -> Array:
        classifier = Classifier(base.config, found.adaptation, base.tensors, found.trainable, dtype=torch.float32, device=self._device)
        with torch.no_grad():
            return to_numpy(classifier(*(torch.tensor(value, device=self._device) for value in (input_ids, mask))))


def _save(folder: Path, base: Path, settings: AdapterSettings, tensors: Mapping[str, torch.Tensor]) -> None:
    adaptation = Adaptation(**asdict(settings))
    adapter.save_adapter(folder, checkpoint.read_config(base), adaptation, tensors, base=base, extra={"max_seq_len": 64})


def _kill_at(step: int) -> None:
    """Ends this process, as a kill does, where it would change files for the time after the first `step` times."""
    left = step

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in WRITES or (event == "open" and len(arguments) > 1 and arguments[1] not in (None, "r", "rb")):
            left -= 1
            if left < 0:
                os._exit(KILLED)

    sys.addaudithook(hook)


def _arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {name: to_numpy(tensor) for name, tensor in tensors.items()}
