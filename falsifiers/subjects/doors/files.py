"""Adapters and checkpoints on disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from blackswan.reference.table import Array


@dataclass(frozen=True)
class AdapterSettings:
    """What an adapter is besides its tensors. `alpha` is not divided by the rank; `nf4`: it was trained on weights in NF4."""

    classes: int
    rank: int
    alpha: float
    targets: str
    pooling: str
    nf4: bool


@dataclass(frozen=True)
class LoadedAdapter:
    """LoRA factors and head by their plain names, as stored, and the settings."""

    settings: AdapterSettings
    tensors: Mapping[str, Array]


class Files(Protocol):
    """Adapters and checkpoints in folders; `base` is the folder of the checkpoint that an adapter belongs to."""

    def save_adapter(self, folder: Path, base: Path, settings: AdapterSettings, tensors: Mapping[str, Array]) -> None:
        """Saves LoRA factors and head, over an adapter that is there."""

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
        """The same in a process that is killed at that step in the file system, or that cannot write files of more bytes than `limit`."""

    def load_adapter(self, folder: Path, base: Path) -> LoadedAdapter:
        """An adapter as it arrives."""

    def adapter_logits(self, folder: Path, base: Path, input_ids: Array, mask: Array) -> Array:
        """The logits [samples, classes] in float32 of the checkpoint with the adapter, both loaded from their folders."""

    def merge(self, folder: Path, base: Path, merged: Path, trained_in: str | None = None) -> None:
        """Merges an adapter, trained in that dtype where it is not the checkpoint's own, into its checkpoint, as the folder `merged`."""

    def merged_logits(self, folder: Path, input_ids: Array, mask: Array) -> Array:
        """The logits [samples, classes] in float32 of a merged checkpoint and its head, loaded from their folder."""

    def copy_checkpoint(self, base: Path, folder: Path) -> Mapping[str, Array]:
        """Loads a checkpoint, saves it from the device as another folder, and gives the tensors that are loaded from there."""

    def load_decoder(self, folder: Path) -> Mapping[str, Array]:
        """The parameters of a checkpoint's decoder as they are on the device, in the dtype of the files."""

    def load_tokenizer(self, folder: Path) -> int:
        """The number of ids of a checkpoint's tokenizer."""
