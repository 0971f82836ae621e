"""Wrong lines of progress, metrics and boards: one step of `impl` replaced each."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step


@wrong_step("impl.metrics:_before")
def metrics_lose_foreign_lines(before: Any, *given: Any) -> bool:
    """Lines that are no metrics are removed without a word."""
    try:
        return bool(before(*given))
    except ValueError:
        return False


@wrong_step("impl.metrics:cut_back")
def metrics_need_a_line(cut_back: Any, path: Path, *given: Any) -> None:
    """A run that was killed as it made its metrics cannot go on."""
    if path.is_file() and not path.read_bytes():
        raise ValueError(f"{path}: no line to go on from")
    cut_back(path, *given)


# What is shown


@wrong_step("impl.progress:Progress._line")
def progress_left_of_all_steps(line: Any, progress: Any, record: Any) -> str:
    """The time that is left is that of the whole run."""
    return str(line(progress, replace(record, step=0)).replace("step 0/", f"step {record.step}/"))


@wrong_step("impl.progress:Progress._line")
def progress_left_by_all_steps(line: Any, progress: Any, record: Any) -> str:
    """The time that is left is reckoned by this process's seconds over all steps of the run."""
    recent = progress._recent
    share = len(recent) / record.step
    with mock.patch.object(progress, "_recent", [(samples * share, seconds * share) for samples, seconds in recent]):
        return str(line(progress, record))


@wrong_step("impl.progress:Progress.step")
def progress_counts_steps_for_samples(step: Any, progress: Any, record: Any) -> None:
    """Steps a second are called samples a second."""
    step(progress, replace(record, samples=1))


wrong_step("impl.progress:duration", name="progress_hours_of_a_hundred_minutes", doc="Minutes go on beyond an hour.")(
    lambda _, seconds: f"{round(seconds) // 60}:{round(seconds) % 60:02}"
)


wrong_step("impl.progress:duration", name="progress_seconds_of_sixty", doc="Minutes are cut off before seconds are rounded.")(
    lambda duration, seconds: f"{int(seconds // 60)}:{round(seconds % 60):02}" if seconds < 3600 else duration(seconds)
)


@wrong_step("impl.progress:Progress.epoch")
def progress_of_no_loss(epoch: Any, progress: Any, record: Any) -> None:
    """A validation loss of zero is not shown."""
    epoch(progress, replace(record, validation_loss=record.validation_loss or None))


@wrong_step("impl.progress:reading")
def reading_counts_from_the_start(reading: Any, path: Path, stream: Any) -> Any:
    """After the first ten seconds every piece is told."""
    told: list[Any] = [reading(path, stream)]

    def tell(count: int) -> None:
        before = stream.tell() if stream is not None else 0
        told[0](count)
        if stream is not None and stream.tell() != before:
            told[0] = lambda count: stream.write(f"{path}: {count:,} samples read\n")

    return tell


@wrong_step("impl.progress:Progress.epoch")
def progress_seconds_of_a_step(epoch: Any, progress: Any, record: Any) -> None:
    """An epoch's seconds are those of its last step."""
    epoch(progress, replace(record, seconds=progress._recent[-1][1]))


@wrong_step("impl.progress:Progress.__init__")
def progress_never_on_a_terminal(init: Any, progress: Any, *given: Any, **options: Any) -> None:
    """A terminal is not recognised."""
    init(progress, *given, **options)
    progress.live = False


wrong_step("impl.progress:shutil.get_terminal_size", name="progress_lines_of_any_width", doc="Lines are not cut to the terminal's width.")(
    lambda *_: os.terminal_size((1000, 24))
)


@wrong_step("impl.progress:Progress.step")
def progress_keeps_its_first_width(step: Any, progress: Any, record: Any) -> None:
    """Lines are cut to the width that the terminal had at the first one, though it has become narrower."""
    width = progress.__dict__.setdefault("_width", progress._columns())
    with mock.patch.object(progress, "_columns", return_value=width):
        step(progress, record)


wrong_step(
    "impl.progress:Progress._columns", name="progress_as_wide_as_another_stream", doc="Lines are as wide as standard output, or as 80."
)(lambda *_: shutil.get_terminal_size().columns)


@wrong_step("impl.progress:Progress._columns")
def progress_needs_a_descriptor(columns: Any, progress: Any) -> int:
    """A terminal without a descriptor ends the run at its first step."""
    progress.stream.fileno()
    return int(columns(progress))


@wrong_step("impl.progress:Progress._columns")
def progress_of_no_columns(columns: Any, progress: Any) -> int:
    """Lines are not cut on a terminal that says it has 0 columns."""
    own = os.get_terminal_size(progress.stream.fileno()).columns
    return int(columns(progress)) if own or os.environ.get("COLUMNS", "0") != "0" else 0


wrong_step(
    "impl.progress:Progress._columns",
    name="progress_as_wide_as_the_terminal",
    doc="Lines are as wide as the terminal, whatever COLUMNS says.",
)(lambda _, progress: os.get_terminal_size(progress.stream.fileno()).columns or 80)


@wrong_step("impl.metrics:TensorBoard.step")
def board_counts_from_zero(step: Any, board: Any, record: Any) -> None:
    """TensorBoard's first step is 0."""
    step(board, replace(record, step=record.step - 1))


@wrong_step("impl.metrics:TensorBoard.step")
def board_of_other_names(step: Any, board: Any, record: Any) -> None:
    """The numbers of a step have other names than in earlier runs, whose curves end where this one begins."""
    add = (writer := board._open(record.step)).add_scalar
    with mock.patch.object(writer, "add_scalar", lambda tag, *given: add(tag.replace("train/", "step/"), *given)):
        step(board, record)


@wrong_step("impl.metrics:TensorBoard.epoch")
def board_without_validation(epoch: Any, board: Any, record: Any) -> None:
    """TensorBoard is not given what validation found."""
    epoch(board, replace(record, validation_loss=None, validation_accuracy=None))


wrong_step("impl.metrics:TensorBoard._open", name="board_hides_nothing", doc="Steps of an earlier run's later part are shown beside.")(
    lambda right, board, _: right(board, None)
)


@wrong_step("impl.metrics:TensorBoard.epoch")
def board_hides_from_the_epoch(epoch: Any, board: Any, record: Any) -> None:
    """Where the end of an epoch is shown first, steps from the epoch's number on are hidden."""
    board._open(record.epoch)
    epoch(board, record)


wrong_step("impl.metrics:TensorBoard.close", name="board_closed_before_it_opens", doc="A board that was given nothing cannot be closed.")(
    lambda _, board: board._writer.close()
)


wrong_step("impl.metrics:TensorBoard.close", name="board_left_open", doc="The last numbers stay in memory.")(lambda *_: None)


@wrong_step("impl.metrics:write_atomically")
def metrics_that_were_cut_for_their_owner_alone(write: Any, path: Path, content: bytes) -> None:
    """Metrics that a run which goes on has cut back keep the mode of a temporary file, which nobody else can read."""
    write(path, content)
    path.chmod(0o600)
