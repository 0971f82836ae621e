"""What the command `train` shows while it goes on: to people, on a terminal and elsewhere, and to TensorBoard."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_inside
from blackswan.falsifiers.subjects.doors.commands import NOTHING
from blackswan.falsifiers.system.command_problem import RUN, Small, options, small, texts_of, timed_metrics
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, reads_files

COLUMNS = 60
"""Of a terminal on which no whole line has room; it becomes a column narrower with each line that is drawn."""
SECONDS, HOURS = 0.5, 2000.0
"""That a step takes: there samples a second have digits, here the time that is left has hours."""
EPOCHS = 2
MANY = 120
"""Steps, more than those by whose pace the time that is left is told."""
SATURATING = 100.0
"""A learning rate by which one step makes the class of all samples so probable that float32 has no number between that and 1."""
PIECE = 1024
"""So many texts are read at a time."""
CLEAR = "\r\x1b[2K"
LINE = re.compile(r"(.*?)  ([\d.]+) samples/s  (?:.*  )?(?:(\d+):([0-5]\d)|([1-5]?\d)):([0-5]\d) left")
Lines = Sequence[Mapping[str, Any]]


@reads_files
def progress_is_of_the_records(trial: Trial) -> list[Comparison]:
    """Each line about steps and epochs, and each number for TensorBoard, is that of the run's metrics.

    Elsewhere than on a terminal every so many steps have a line, on it every step has one, which the next one takes the place of. There
    the run is interrupted in its first epoch, or in that one's last step, and goes on. The folder for TensorBoard may be in the run's own.
    """
    settings = {"multi_label": False, "batch_size": 1, "accumulation_steps": 2, "epochs": EPOCHS, "log_interval": 3, "backend": "torch"}
    with small(trial, "progress", settings) as problem:
        rng = trial.rng("progress")
        corpus = problem.corpus("corpus", texts_of(rng, 9), problem.labels(rng, 9))
        where = [f"--model={problem.base}", f"--corpus={corpus}", *options(problem.settings)]
        board = problem.folder / "board"
        found = []
        for pace in (SECONDS, HOURS):
            run = problem.folder / f"run {pace}"
            said, noted = trial.commands.shown("train", f"--output={run}", f"--tensorboard={board}", *where, pace=pace)
            lines = timed_metrics(run)
            found += same(f"status at {pace} s a step", 0, said.status)
            found += _elsewhere(lines, said.err, 3)
            found += _on_a_board(board, lines, noted)
            found += same(f"files whose reading is shown at {pace} s", [(str(corpus), "9")] if pace == HOURS else [], _read(said.err))
        last = max(line["step"] for line in lines if line["kind"] == "step" and line["epoch"] == 1)
        within = int(rng.integers(1, last))  # the run goes on with a step, or with the end of the epoch
        said_wide = int(rng.integers(20, 50))
        for step, columns, variable in ((within, COLUMNS, said_wide), (last, COLUMNS, 0), (within, 0, 0)):
            run = problem.folder / f"interrupted {step} {columns}"
            found += _interrupted(trial, board if columns else run / "board", run, where, step, columns, variable)
        found += [
            *_over(trial, problem.folder / f"interrupted {last} {COLUMNS}", board, where),
            *_of_no_loss(trial, problem, where),
            *_durations(trial),
            *_of_many_steps(trial),
        ]
        found += _reading(trial, problem, where)
        refused = problem.folder / "refused"
        said, _ = trial.commands.shown("train", f"--output={refused}", f"--tensorboard={board}", *where, board=False)
        found += same("status without TensorBoard, and the folder", (4, False), (said.status, (refused / "run.json").exists()))
        return found if "--tensorboard" in said.err else [*found, broken("message without TensorBoard", "does not name it", "", said.err)]


def _interrupted(
    trial: Trial, board: Path, run: Path, where: Sequence[str], step: int, columns: int, variable: int
) -> Iterator[Comparison]:
    """On a terminal, Ctrl-C in that step; the message has a line of its own. The run that goes on, on a terminal or not, shows
    and counts its own steps alone, on a terminal as wide as COLUMNS says, if it is not 0."""
    made = 0
    for more, interrupt, status, wide, fixed in (([], step, 2, COLUMNS, 0), (["--resume"], None, 0, columns, variable)):
        given = ["train", f"--output={run}", f"--tensorboard={board}", *more, *where]
        said, noted = trial.commands.shown(*given, columns=wide, variable=fixed, pace=SECONDS, interrupt=interrupt)
        lines = timed_metrics(run)[made:]
        yield from same(f"status on a terminal {more}", status, said.status)
        if wide:
            yield from _on_a_terminal(lines, _total(run), said.err, f"interrupted after step {step};" if interrupt else "", fixed)
        else:
            yield from _elsewhere(lines, said.err, 3, _total(run))
        yield from _on_a_board(board, lines, noted)
        made += len(lines)


def _over(trial: Trial, run: Path, board: Path, where: Sequence[str]) -> list[Comparison]:
    """A run that is over shows nothing when it is asked to go on, and gives TensorBoard nothing: not so much as an empty file."""
    said, noted = trial.commands.shown("train", f"--output={run}", f"--tensorboard={board}", "--resume", *where, columns=COLUMNS)
    return same("what a run that is over shows", (0, "", []), (said.status, said.err, noted))


def _of_no_loss(trial: Trial, problem: Small, where: Sequence[str]) -> Iterator[Comparison]:
    """A number that is zero is shown like any other: one step of this size makes every loss exactly zero.

    The classification head takes it, on samples that are all alike. The adapters hardly count, since they would move what the head reads.
    """
    run, board = problem.folder / "of no loss", problem.folder / "board of no loss"
    given = [f"--{name}={problem.corpus(f'{name} of no loss', ['ls'] * 3, [0] * 3)}" for name in ("corpus", "validation")]
    of_the_head = ("--weight-decay=0", "--lora-alpha=1e-9")  # a decay would turn the parameters' signs
    arguments = ("train", f"--output={run}", f"--tensorboard={board}", *where, *given, f"--learning-rate={SATURATING}", *of_the_head)
    said, noted = trial.commands.shown(*arguments, pace=SECONDS)
    lines = timed_metrics(run)
    losses = [each["validation_loss"] for each in lines if each["kind"] == "epoch"]
    yield from same("validation losses after a step that is too large", [0.0] * EPOCHS, losses)
    yield from _elsewhere(lines, said.err, 3)
    yield from _on_a_board(board, lines, noted)
    yield from same("the loss at the end", True, said.out.endswith("(validation loss 0.0000)\n"))


def _durations(trial: Trial) -> list[Comparison]:
    """Times are shown in whole seconds, the nearest: what is nearly a minute or an hour is one."""
    rng = trial.rng("durations")
    at = [whole + part for whole in (0, 59, 60, 3599, 3600, 86399, int(rng.integers(3, 10**6))) for part in (0.0, 0.4, 0.6)]
    expected = []
    for each in at:
        seconds = int(each + 0.5)
        hours = f"{seconds // 3600}:{seconds // 60 % 60:02}" if seconds >= 3600 else f"{seconds // 60}"
        expected.append(f"{hours}:{seconds % 60:02}")
    return same("times that are left", expected, trial.commands.durations(at))


def _of_many_steps(trial: Trial) -> Iterator[Comparison]:
    """Speed and time left are those of the last steps, all of a like pace, also where these are more than any window holds.

    Where a terminal says no size, a step's line fits into 80 columns.
    """
    rng, same_in_all = trial.rng("many steps"), {"kind": "step", "epoch": 1, "loss": 0.5, "accuracy": 0.5, "gradient_norm": 1.0}
    rest = same_in_all | {"learning_rate": 1e-3, "samples": int(rng.integers(100, 200))}
    pace = float(rng.uniform(10.0, 20.0))
    steps = [{**rest, "step": number, "seconds": pace * float(rng.uniform(1.0, 1.01))} for number in range(1, MANY + 1)]
    yield from _elsewhere(steps, trial.commands.told(steps, EPOCHS), 1, 2 * MANY)
    for descriptor in (True, False):
        drawn = trial.commands.drawn(steps[-1], descriptor).removeprefix(CLEAR)
        yield value_inside(f"letters of a step on a terminal that says no size, descriptor {descriptor}", len(drawn), 20, 79)


def _total(run: Path) -> int:
    return int(json.loads((run / RUN).read_text())["total_steps"])


def _reading(trial: Trial, problem: Small, where: Sequence[str]) -> list[Comparison]:
    """The number of samples read is shown while a large corpus is read, and grows to nearly all of them; the last line is no sample.

    A piece takes about five seconds here, so that ten have passed with every second one.
    """
    many = int(trial.rng("many").integers(6, 9)) * PIECE + 1
    corpus = problem.corpus("many", ["ls"] * many, [*[0] * (many - 1), -1])
    said, _ = trial.commands.shown("train", f"--output={problem.folder / 'many'}", *where, f"--corpus={corpus}", pace=4.0)
    shown = _read(said.err)
    counts = [int(count.replace(",", "")) for _, count in shown]
    return [
        *same("files whose reading is shown", {str(corpus)}, {name for name, _ in shown}),
        *same("samples that were read, in their order", sorted({*counts}), counts),
        value_inside("samples that were read at last", max(counts, default=0), many / 2, many - 1),
        value_inside("lines about the reading", len(shown), 1, many // PIECE // 2),
    ]


def _read(err: str) -> list[tuple[str, str]]:
    return re.findall(r"^(.*): ([\d,]+) samples read$", err, re.MULTILINE)


def _texts(lines: Lines, total: int) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Each line of the metrics, and what people are told of it up to what depends on the time."""
    for line in lines:
        if line["kind"] == "step":
            text = f"epoch {line['epoch']}/{EPOCHS}  step {line['step']}/{total}  loss {line['loss']:.4f}"
            yield line, f"{text}  gradient norm {line['gradient_norm']:.3g}  lr {line['learning_rate']:.3g}"
        else:
            text = f"epoch {line['epoch']}/{EPOCHS} done  train loss {line['train_loss']:.4f}"
            text += f"  validation loss {line['validation_loss']:.4f}  accuracy {line['validation_accuracy']:.3f}"
            yield line, f"{text}  {line['seconds']:.1f} s{'  best so far' * line['best']}"


def _elsewhere(lines: Lines, err: str, every: int, total: int = 0) -> Iterator[Comparison]:
    steps = [line for line in lines if line["kind"] == "step"]
    texts = _texts(lines, total or len(steps))
    due = [(line, text) for line, text in texts if line["kind"] == "epoch" or line["step"] % every == 0 or line == steps[-1]]
    shown = [line for line in err.splitlines() if line.startswith("epoch ")]
    parsed = [LINE.fullmatch(line) for line in shown]
    yield from same("lines", [text for _, text in due], [match[1] if match else line for match, line in zip(parsed, shown, strict=True)])
    for (line, _), match in zip(due, parsed, strict=False):
        if match and line["kind"] == "step":
            yield from _timed(steps, line, match, total or len(steps))


def _timed(steps: Lines, line: Mapping[str, Any], match: "re.Match[str]", total: int) -> Iterator[Comparison]:
    """Samples a second and the time that is left, by the steps that this process has made, whichever of them are counted."""
    now = [each for each in steps if each["step"] <= line["step"]]
    speeds, seconds = [each["samples"] / each["seconds"] for each in now], [each["seconds"] for each in now]
    yield value_inside(f"samples a second at step {line['step']}", float(match[2]), min(speeds) - 0.051, max(speeds) + 0.051)
    left = 3600 * int(match[3] or 0) + 60 * int(match[4] or match[5]) + int(match[6])
    more = total - line["step"]
    yield value_inside(f"seconds left at step {line['step']}", left, more * min(seconds) - 0.51, more * max(seconds) + 0.51)


def _on_a_terminal(lines: Lines, total: int, err: str, message: str, fixed: int) -> Iterator[Comparison]:
    wide = COLUMNS - 1 + (lines[0]["kind"] == "epoch")  # that line is drawn over no other, after which the terminal would be narrower
    texts = enumerate(_texts(lines, total))
    expected = [text[: fixed - 1 if fixed else wide - drawn] if line["kind"] == "step" else f"{text}\n" for drawn, (line, text) in texts]
    drawn = err.split(CLEAR)
    if message:
        drawn[-1], _, said = drawn[-1].partition("\n")
        yield from same("what stands below what is drawn", True, message in said)
    nothing = [""] * (lines[0]["kind"] == "step")  # stands before the first line, where that is drawn over what is there
    yield from same("what is drawn on a terminal", [*nothing, *expected], drawn)


def _on_a_board(folder: Path, lines: Lines, noted: Sequence[tuple[str, float, int]]) -> Iterator[Comparison]:
    """Each number of a step and of an epoch once, at its number, by the name that earlier runs gave it; what an earlier one
    showed from this run's first step on is hidden."""
    expected = []
    for line in lines:
        group, names = "train", ["loss", "accuracy", "gradient_norm", "learning_rate"]
        if line["kind"] == "epoch":
            group, names = "epoch", ["train_loss", "validation_loss", "validation_accuracy"]
        expected += [(f"{group}/{name}", line[name], line.get("step", line["epoch"])) for name in names]
        if line["kind"] == "step":
            expected.append((f"{group}/samples_per_second", line["samples"] / line["seconds"], line["step"]))
    opened, *scalars, closed = noted or [("", 0.0, 0)] * 2
    first = float(lines[0].get("step", NOTHING))  # where the end of an epoch comes first, no step after it was ever shown
    yield from same("opening and closing of TensorBoard", (f"opened {folder}", first, "closed"), (*opened[:2], closed[0]))
    yield from same("numbers for TensorBoard", sorted(expected), sorted(scalars))
