"""Progress of a training run: one line that is redrawn on a terminal, plain lines elsewhere; and of the reading of a large corpus."""

import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from blackswan.impl.fit import EpochRecord, StepRecord

READING_SECONDS = 10.0
_WINDOW = 20
_CLEAR = "\r\x1b[2K"


class Progress:
    """Shows steps and epochs on a stream: each step on a terminal, else every `log_interval` steps and the last; each epoch on a line."""

    def __init__(self, stream: TextIO, *, epochs: int, total_steps: int, log_interval: int) -> None:
        self.stream, self.epochs, self.total_steps, self.log_interval = stream, epochs, total_steps, log_interval
        self.live = stream.isatty()
        self._recent: deque[tuple[int, float]] = deque(maxlen=_WINDOW)
        self._shown = False

    def step(self, record: "StepRecord") -> None:
        """Notes a step, and shows it where it is due."""
        self._recent.append((record.samples, record.seconds))
        if self.live:
            self.stream.write(_CLEAR + self._line(record)[: self._columns() - 1])
            self.stream.flush()
            self._shown = True
        elif record.step % self.log_interval == 0 or record.step == self.total_steps:
            self._print(self._line(record))

    def epoch(self, record: "EpochRecord") -> None:
        """Shows an epoch's losses."""
        text = f"epoch {record.epoch}/{self.epochs} done  train loss {record.train_loss:.4f}"
        if record.validation_loss is not None:
            text += f"  validation loss {record.validation_loss:.4f}  accuracy {record.validation_accuracy:.3f}"
        self._print(f"{text}  {record.seconds:.1f} s" + ("  best so far" if record.best else ""))

    def close(self) -> None:
        """Leaves the terminal at the start of an empty line."""
        if self._shown:
            self.stream.write("\n")
            self.stream.flush()
            self._shown = False

    def _columns(self) -> int:
        """COLUMNS says the width, or else the terminal of standard output; where that is a file or a pipe, this stream's."""
        try:
            own = os.get_terminal_size(self.stream.fileno())
        except OSError:
            return shutil.get_terminal_size().columns
        return shutil.get_terminal_size((own.columns or 80, own.lines)).columns  # a terminal that knows no size says 0

    def _print(self, text: str) -> None:
        self.stream.write((_CLEAR if self._shown else "") + text + "\n")
        self.stream.flush()
        self._shown = False

    def _line(self, record: "StepRecord") -> str:
        samples, seconds = (sum(column) for column in zip(*self._recent, strict=True))
        norm = "-" if record.gradient_norm is None else f"{record.gradient_norm:.3g}"
        left = (self.total_steps - record.step) * seconds / len(self._recent)
        return (
            f"epoch {record.epoch}/{self.epochs}  step {record.step}/{self.total_steps}  loss {record.loss:.4f}  gradient norm {norm}"
            f"  lr {record.learning_rate:.3g}  {samples / max(seconds, 1e-9):.1f} samples/s  {duration(left)} left"
        )


def reading(path: Path, stream: TextIO | None) -> Callable[[int], None]:
    """What is told how many samples of a file have been read, and says so on a stream every READING_SECONDS."""
    said = time.monotonic()

    def tell(count: int) -> None:
        nonlocal said
        if stream is not None and time.monotonic() >= said + READING_SECONDS:
            stream.write(f"{path}: {count:,} samples read\n")
            stream.flush()
            said = time.monotonic()

    return tell


def duration(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
