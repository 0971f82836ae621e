"""metrics.jsonl, a line a step and a line an epoch; and the same to TensorBoard where it is installed."""

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blackswan.impl import strict_json
from blackswan.impl.folder import naming
from blackswan.impl.training_state import write_atomically

if TYPE_CHECKING:
    from blackswan.impl.fit import EpochRecord, StepRecord


class MetricsFile:
    """Appends records to a file as they come.

    A run that goes on from an earlier step writes the steps after it anew: with the first record, the file loses every line from that
    record on, and a last line that a kill tore, so that no step is in it twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cut = False

    def step(self, record: "StepRecord") -> None:
        """Appends a step's line."""
        self._append(record.epoch, record.step, {"kind": "step", **dataclasses.asdict(record)})

    def epoch(self, record: "EpochRecord") -> None:
        """Appends an epoch's line."""
        self._append(record.epoch, None, {"kind": "epoch", **dataclasses.asdict(record)})

    def _append(self, epoch: int, step: int | None, values: dict[str, Any]) -> None:
        if not self._cut:
            cut_back(self.path, epoch, step)
            self._cut = True
        finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite, allow_nan=False) + "\n")


def cut_back(path: Path, epoch: int, step: int | None) -> None:
    """Removes what stands from that step on, or with no step from that epoch's own line on. The file changes at once or not at all."""
    if not path.exists():
        return
    lines = path.read_bytes().decode("utf-8", "replace").splitlines(keepends=True)
    whole = lines if not lines or lines[-1].endswith("\n") else lines[:-1]  # a kill may have torn the last one
    kept = [line for number, line in enumerate(whole, start=1) if _before(line, epoch, step, f"{path}:{number}")]
    if kept != lines:
        write_atomically(path, "".join(kept).encode())


def _before(line: str, epoch: int, step: int | None, where: str) -> bool:
    try:
        values = strict_json.loads(line)
        if values["kind"] == "epoch":
            return bool(values["epoch"] < epoch)
        return bool(values["epoch"] <= epoch if step is None else values["step"] < step)
    except (ValueError, KeyError, TypeError) as error:
        reason = f"is no line of a run's metrics ({type(error).__name__}: {error})"
        raise ValueError(f"{where}: {reason}; remove the line, or restore the file from a copy, and resume again") from None


class TensorBoard:
    """The same records as scalars for TensorBoard. Raises a ValueError where TensorBoard is not installed."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("--tensorboard: TensorBoard is not installed; pip install tensorboard, or leave the option out") from None
        self._folder, self._writer_class = folder, SummaryWriter
        self._writer: Any = None

    def step(self, record: "StepRecord") -> None:
        """Loss, accuracy, gradient norm, learning rate and samples a second of a step."""
        writer = self._open(record.step)
        for name in ("loss", "accuracy", "gradient_norm", "learning_rate"):
            if (value := getattr(record, name)) is not None:
                writer.add_scalar(f"train/{name}", value, record.step)
        writer.add_scalar("train/samples_per_second", record.samples / max(record.seconds, 1e-9), record.step)

    def epoch(self, record: "EpochRecord") -> None:
        """Losses and validation accuracy of an epoch."""
        for name in ("train_loss", "validation_loss", "validation_accuracy"):
            if (value := getattr(record, name)) is not None:
                self._open(None).add_scalar(f"epoch/{name}", value, record.epoch)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            with naming(self._folder):
                self._writer.close()

    def _open(self, step: int | None) -> Any:
        """The writer, made with the first record: nothing is written before; steps from an earlier run's later part are hidden."""
        if self._writer is None:
            self._writer = self._writer_class(str(self._folder), purge_step=step)
        return self._writer
