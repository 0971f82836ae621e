"""A command that is killed or interrupted while it trains, and goes on as if it had not been."""

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_inside
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.doors.training import Kill, Rank
from blackswan.falsifiers.system.command_problem import (
    CONFIG,
    METRICS,
    RUN,
    STATE,
    STATISTICS,
    metrics,
    number_of,
    options,
    small,
    texts_of,
    timed_metrics,
)
from blackswan.falsifiers.system.continued import KILLED
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.trial import Trial, reads_files

READ = 0o444
"""The bits of a file's mode that let its owner, its group and all others read it."""
LINE = "a line of the metrics"
"""The event before one is written."""
MANY = 10_000
"""So many steps were made after the last state; their lines take more than a megabyte."""


@reads_files
def killed_command_goes_on(trial: Trial, *, kills: int) -> Iterator[Comparison]:
    """A command that is killed at its writes, a line of its metrics torn, and given again with --resume leaves what a whole run does.

    Before, it is interrupted, also in an epoch's last step. Two kills come before a state is written, so that steps are made again, and an
    epoch ends again; and the state is written after every so many steps. A command that goes on is given model and corpus by other names.
    """
    rng = trial.rng("kills")
    every = int(rng.integers(3, 5))
    settings = {"multi_label": False, "batch_size": 1, "accumulation_steps": 2, "learning_rate": 0.02, "backend": "torch", "epochs": 3}
    settings["class_weights"] = [0.5, 2.0, 1.25, 1 / 3]
    with small(trial, "killed", settings) as problem:
        labels: list[Label] = [int(each) % problem.classes for each in rng.permutation(11)]  # classes of one size compete for the split
        corpus = problem.corpus("corpus", texts_of(rng, 11), labels)
        where = [f"--model={problem.base}", f"--corpus={corpus}", f"--save-every={every}", *options(problem.settings)]
        elsewhere = [*where, f"--model={_linked(problem.base)}", f"--corpus={_linked(corpus)}"]
        whole, folder = problem.folder / "whole", problem.folder / "killed"
        rank = trial.commands.killed(whole, None, "train", f"--output={whole}", *where)
        if rank.ended:
            yield broken("the whole run", "failed", "its end", rank.ended)
            return
        ours = [name for name in rank.events if "/.ledger.json." not in name]  # which is the host's, on a GPU
        if outside := [name for name in ours if name.startswith("flush ../")]:
            yield broken("the whole run", "files written outside of its folder", "none", ", ".join(outside[:3]))
            return
        yield from same("steps between two states", *_between_states(whole, rank, every))
        yield from same("names that were given to what is not on the disk", [], _not_flushed(rank.events))
        yield from same("epochs that are told before their adapters are on the disk", [], _told_too_early(metrics(whole), rank.events))
        steps = [line["kind"] for line in metrics(whole)].index("epoch")
        interrupted = iter((2, steps))
        planned = _kills(rng, rank.events, steps, every, kills)
        for kill in (*planned, None):
            resume = ["--resume"] if (folder / RUN).is_file() else []
            begun = trial.trainer.kept(folder).progress if (folder / STATE).is_file() else {"step": 0, "epoch": 0, "position": 0}
            due = (
                begun["step"] in (2, steps) or begun["step"] % every == 0 or begun["position"] == 0
            )  # by Ctrl-C, by number, as an epoch ends
            yield from same(f"whether a state is due after step {begun['step']}", True, due)
            rank = trial.commands.killed(folder, kill, "train", f"--output={folder}", *resume, *(elsewhere if resume else where))
            if kill and kill.interrupt:
                yield from _interrupted(trial, folder, next(interrupted), rank.ended)
                if kill is planned[1]:
                    yield from _foreign_line(trial, folder, where)
                    yield from _far_behind(trial, whole, folder, where)
                continue
            expected, saved = _between_states(whole, rank, every, begun)
            yield from same(f"steps up to each state of a run that began after {begun['step']}", expected[: len(saved)], saved)
            if rank.ended != (KILLED if kill else ""):
                if rank.ended or kill is None:
                    yield broken("a continued run", "did not go on", "its end", rank.ended)
                    return
                break
            if kill is not planned[4]:  # the epoch's line stays whole, though steps before it are made again
                _tear(trial, rng, folder)
        yield from same("numbers of the lines of the metrics", *(list(map(number_of, metrics(each))) for each in (whole, folder)))
        yield from same("metrics", metrics(whole), metrics(folder))
        yield from _seconds_add_up(folder)
        for file in (CONFIG, STATISTICS, RUN):
            yield from same(file, (whole / file).read_text(), (folder / file).read_text())
        yield from same("state and adapters", *(trial.trainer.kept(each) for each in (whole, folder)))
        yield from _started_again(trial, whole, folder, where)
        left = [sorted(path.name for path in each.iterdir()) for each in (whole, folder)]
        modes = {path.name: [(each / path.name).stat().st_mode for each in (whole, folder)] for path in whole.iterdir() if path.is_file()}
        lost = [name for name, (before, now) in modes.items() if before & ~now & READ]
        yield from same("files of the killed run that fewer may read", [], lost)
    yield from same("files of the run", *left)


def _linked(path: Path) -> Path:
    """Another name of a file or folder."""
    link = path.with_name(f"moved {path.name}")
    link.symlink_to(path)
    return link


def _not_flushed(events: Sequence[str]) -> list[str]:
    """Files that get their name before their content is on the disk, or whose name is not flushed next: a power failure loses both."""
    odd = []
    for at, event in enumerate(events):
        if event.startswith("os.rename "):
            name = event.removeprefix("os.rename ")
            written = {each.removeprefix("open ") for each in events[:at] if each == f"open {name}" or each.startswith(f"open {name}/")}
            last = {each: max(place for place in range(at) if events[place] == f"open {each}") for each in written}
            odd += [each for each, opened in last.items() if f"flush {each}" not in events[opened:at]]
            odd += [name] if events[at + 1 : at + 2] != [f"flush {Path(name).parent}"] else []
    return odd


def _told_too_early(lines: Sequence[Mapping[str, Any]], events: Sequence[str]) -> list[int]:
    """Epochs whose line is written before last/, or for a best one best/, is: who reads the line may take the adapter."""
    early, written, rest = [], {"last": 0, "best": 0}, iter(lines)
    due = dict(written)
    for event in events:
        if (name := event.removeprefix("flush .partial-")) in written:
            written[name] += 1
        elif event == LINE and (line := next(rest))["kind"] == "epoch":
            due = {"last": due["last"] + 1, "best": due["best"] + line["best"]}
            early += [line["epoch"]] * (due != written)
    return early


def _foreign_line(trial: Trial, folder: Path, where: Sequence[str]) -> Iterator[Comparison]:
    """A run does not go on where its metrics hold a line of something else, which stays; the message names file and line. So it is behind
    a step that is to be made again too."""
    rng, last = trial.rng("foreign"), timed_metrics(folder)[-1]
    lines = [*(folder / METRICS).read_text().splitlines(keepends=True), json.dumps({**last, "step": last["step"] + 1}) + "\n"]
    kinds = (["epoch 1", "{"], ['{"loss": 1.0}', '{"kind": "step", "epoch": 1}'], ["[1]", '"step"'])
    for number, (others, at) in enumerate([*((each, 1) for each in kinds), (kinds[0], len(lines))]):
        copy, line = folder.with_name(f"foreign {number}"), str(rng.choice(others))
        shutil.copytree(folder, copy)
        (copy / METRICS).write_text("".join([*lines[:at], f"{line}\n", *lines[at:]]))
        before = (copy / METRICS).read_bytes()
        said = trial.commands.attempt("train", f"--output={copy}", "--resume", *where)
        yield from same(f"status of a run that goes on after the line {line}", 1, said.status)
        if (place := f"{METRICS}:{at + 1}") not in said.err:
            yield broken(f"message about the line {line}", "does not name it", place, said.err[-300:])
        yield from same(f"metrics with the line {line}", before, (copy / METRICS).read_bytes())


def _far_behind(trial: Trial, whole: Path, folder: Path, where: Sequence[str]) -> Iterator[Comparison]:
    """However many lines were written after the state that a run goes on from, none of them is left."""
    copy = folder.with_name("far behind")
    shutil.copytree(folder, copy)
    last = timed_metrics(copy)[-1]
    with (copy / METRICS).open("a") as file:
        file.writelines(json.dumps({**last, "step": last["step"] + more}) + "\n" for more in range(1, MANY + 1))
    said = trial.commands.attempt("train", f"--output={copy}", "--resume", *where)
    yield from same(f"status of a run that goes on from {MANY} steps before", 0, said.status)
    yield from same(
        f"numbers of the lines after {MANY} steps are made again", *(list(map(number_of, metrics(each))) for each in (whole, copy))
    )


def _started_again(trial: Trial, whole: Path, folder: Path, where: Sequence[str]) -> Iterator[Comparison]:
    """torchrun gives the same command again after a worker's death: it begins a run that had not begun, and goes on with one that had; of
    one that has come to its end it says the end again and changes nothing, as --resume does.

    This is another process than the runs' before, and sets have another order here; what is written is the same."""
    fresh, again = folder.with_name("fresh"), {"TORCHELASTIC_RESTART_COUNT": "1"}
    fresh.mkdir()
    for name in (CONFIG, STATISTICS, f".partial-{RUN}.abcdefgh", ".lock"):  # as a start leaves them that was killed at once
        (fresh / name).write_text("?")
    trial.commands.attempt("train", f"--output={fresh}", *where, environment=again)
    yield from same("names in its folder", *(sorted(path.name for path in each.iterdir()) for each in (whole, fresh)))
    yield from same("state and adapters of a run that was started again", *(trial.trainer.kept(each) for each in (whole, fresh)))
    for file in (CONFIG, STATISTICS, RUN):
        yield from same(f"{file} of a run that was started again", (whole / file).read_text(), (fresh / file).read_text())
    before, said = content(folder), []
    for more, environment in (["--resume"], {}), ([], dict.fromkeys(again, "12")):
        said.append(trial.commands.attempt("train", f"--output={folder}", *more, *where, environment=environment))
        changed = sorted(file for file, _ in content(folder).items() ^ before.items())
        yield from same(f"status of a run that is over, and what changes {more}", (0, []), (said[-1].status, changed))
    yield from same("what a run that is over says", said[0].out, said[1].out)
    first = trial.commands.attempt("train", f"--output={folder}", *where, environment=dict.fromkeys(again, "0"))
    yield from same("status of a first start in the folder of a run, and what it changes", (4, before), (first.status, content(folder)))


def _interrupted(trial: Trial, folder: Path, step: int, ended: str) -> Iterator[Comparison]:
    """After Ctrl-C in a step: status 2, and a message that names this step, whose line and whose state are written."""
    last = max((line["step"] for line in metrics(folder) if line["kind"] == "step"), default=0)
    message = rf"status 2: (?s:.*)impl train: .*\b{last}\b.*--resume"
    if not re.match(message, ended):
        yield broken("end after an interruption", "another one", message, ended[-300:] or "the end of the run")
    yield from same("last step of an interrupted run", step, last)
    yield from same("step of the state after an interruption", last, trial.trainer.kept(folder).progress["step"])


def _seconds_add_up(folder: Path) -> Iterator[Comparison]:
    """The seconds of an epoch are at least those of its steps, whichever process made them."""
    lines = timed_metrics(folder)
    for epoch in (line for line in lines if line["kind"] == "epoch"):
        steps = [line["seconds"] for line in lines if line["kind"] == "step" and line["epoch"] == epoch["epoch"]]
        least = math.fsum(steps) * (1 - 1e-12)  # they are added one after the other
        yield value_inside(f"seconds of epoch {epoch['epoch']} and of its steps", epoch["seconds"], least, math.inf)


def _between_states(
    whole: Path, rank: Rank, every: int, begun: Mapping[str, int] = MappingProxyType({"step": 0, "epoch": 0})
) -> tuple[list[int], list[int]]:
    """The numbers of lines that the whole run's metrics have when a state is written, as they should be and as they were.

    A state follows each epoch and every so many steps, counted from the beginning of the run, also where it goes on from `begun`.
    """
    lines = metrics(whole)
    before = sum(line["step"] <= begun["step"] if line["kind"] == "step" else line["epoch"] <= begun["epoch"] for line in lines)
    made, found, expected = before, [], [] if begun["step"] else [0]
    for event in rank.events:
        if event == LINE:
            made += 1
        elif event.startswith("os.rename state/"):
            found.append(made)
    for place, line in enumerate(lines, start=1):
        if place > before and (line["kind"] == "epoch" or line["step"] % every == 0):
            expected.append(place)
    return expected, found


def _kills(rng: Generator, events: Sequence[str], steps: int, every: int, count: int) -> list[Kill]:
    """A kill before the first line; Ctrl-C in the second step and in the last one of an epoch; kills between the epoch's line and its
    state, between those of the second epoch, whose last steps are then made again, and between two states; and kills at random events
    after the beginning, by their names."""
    saved = events.index("flush .partial-last")  # the epoch's adapter; its line and the state come next
    state = next(event for event in events[saved:] if event.startswith("os.rename state/"))
    again = sum(step % every == 0 for step in range(steps + 1, 2 * steps))  # states inside the second epoch
    first = [
        Kill(LINE, 1),
        Kill(LINE, 2, interrupt=True),
        Kill(LINE, steps - 2, interrupt=True),
        Kill(state, 1),
        Kill(state, again + 2),
        Kill(LINE, every),
    ]
    names = sorted(
        {name for name in events if not name.startswith(("os.mkdir", f"open {CONFIG}", f"open {STATISTICS}")) and RUN not in name}
    )
    return [*first, *(Kill(str(name), 1) for name in rng.permutation(names)[: count - 2])]


def _tear(trial: Trial, rng: Generator, folder: Path) -> None:
    """Cuts a part of the last line off, in half of the cases, as a kill in the middle of its writing does: before its state is written.
    In the others there are bytes behind it that are no text, as a power failure leaves them.

    Where there is none yet, the file is made and nothing is in it.
    """
    if not (folder / STATE).is_file():
        return
    (folder / METRICS).touch()
    content, made = (folder / METRICS).read_bytes(), trial.trainer.kept(folder).progress
    if not content.endswith(b"\n"):
        return
    last, start = metrics(folder)[-1], content.rstrip(b"\n").rfind(b"\n") + 1
    counted = last["step"] <= made["step"] if last["kind"] == "step" else last["epoch"] <= made["epoch"]
    if not counted and rng.integers(2):
        (folder / METRICS).write_bytes(content[: int(rng.integers(start + 1, len(content)))])
    elif not counted:
        (folder / METRICS).write_bytes(content + b"\xff\xfe\0")
