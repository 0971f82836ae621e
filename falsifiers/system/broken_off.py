"""Commands that Ctrl-C or a full disk breaks off: how they end, what they say, and what they leave."""

import errno
import json
import os
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.system.adapter_files import CONFIG
from blackswan.falsifiers.system.command_problem import LARGE_TEXT, METRICS, Small, metrics, options, small, texts_of
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.trial import Trial, reads_files

TOO_LARGE = os.strerror(errno.EFBIG)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
"""Why a disk takes nothing more: it is full, over its quota, limited in the size of files, broken, or read-only by now."""
SECOND_STEP = 7
"""The number of the flush that brings the state of a run's second step to the disk: those before it are for run.json and two states."""
FEW = 1000
"""Bytes, fewer than any file of weights has."""
LARGE = 1 << 22
"""Bytes, more than any other file of a small run has."""
ILLEGAL = "CUDA error: an illegal memory access was encountered"
"""A defect of a kernel, which speaks of memory and is no lack of it."""
BLOCK = 4096
"""Bytes that C's library keeps back until a file is closed, when nobody may ask whether they had room."""
TEMPLATE = "chat_template.jinja"
FULL = Path("/dev/full")
"""A file to which nothing can be written: its disk is full."""
SPECIAL = {"eos_token_id": [1, 3], "pad_token_id": 0}
"""Two tokens that end texts, as models that chat have them, and token 0 for padding, whose id must not be taken for none."""


STATUSES = {
    1: "TrainingFailed FloatingPointError NotResident OutOfMemoryError WarmUpFailed WorkerFailed WorkerLost MemoryError BrokenPipeError",
    2: "KeyboardInterrupt",
    4: "BadInput ValueError FileNotFoundError",
    6: "DeviceUnavailable InsufficientMemory",
}
"""What a command ends with where it meets such an error: failed, interrupted, bad input, no device or too little memory of one."""
DEFECTS = "RuntimeError TypeError AssertionError AttributeError"
"""Errors that only a defect raises: nothing is made of them, so that they can be reported with their traceback."""
NO_ROOM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9223372036854775807 bytes"
"""What torch says where the host has no memory, by an error of no kind of its own."""


@reads_files
def broken_off_commands_say_so(trial: Trial) -> Iterator[Comparison]:
    """Each command that writes ends with status 1 and names the place where a disk takes no more; after Ctrl-C it ends with status 2.

    Each command meets another of the reasons in DISK. Models and tokens are there whole or not at all; a run leaves no file half written,
    and goes on where its metrics had no room. A pre-training run says after Ctrl-C how it goes on, and then leaves what a whole run does.
    """
    rng = trial.rng("broken off")
    settings = {"multi_label": False, "epochs": 1, "batch_size": 1, "log_interval": 1}
    with small(trial, "broken off", settings) as problem:
        config = json.loads((problem.base / CONFIG).read_text())
        (problem.base / CONFIG).write_text(json.dumps(config | SPECIAL))
        texts = texts_of(rng, 6)
        corpus, run, tokens = problem.corpus("corpus", texts, problem.labels(rng, 6)), problem.folder / "run", problem.folder / "tokens"
        train = ("train", f"--model={problem.base}", f"--corpus={corpus}", "--save-every=1", *options(problem.settings))
        tokenize = ("tokenize", corpus, f"--model={problem.base}", "--end-token=1")
        trial.commands.run(*train, f"--output={run}")
        trial.commands.run(*tokenize, f"--output={tokens}")
        whole = {"tokenize": tokenize, "merge": ("merge", f"--adapter={run}"), "export": ("export", f"--model={problem.base}")}
        whole["export as .apr"] = whole["export"]
        of_train, of_pretrain, *codes = (int(code) for code in [*rng.permutation(DISK), rng.choice(DISK)])
        for (name, arguments), code in zip(whole.items(), codes, strict=True):
            before, new = _names(problem.folder), problem.folder / "not" / "made" / ("new.apr" if name.endswith(".apr") else "new")
            yield from _full(trial, name, new, 1, arguments, code)
            yield from same(f"what {name} leaves on a full disk", before, _names(problem.folder))
            said = trial.commands.broken_off(problem.folder, KeyboardInterrupt(), 1, *arguments, f"--output={new}")
            yield from same(
                f"end of {name} after Ctrl-C", (2, "", f"impl {arguments[0]}: interrupted\n"), (said.status, said.out, said.err)
            )
            yield from same(f"what {name} leaves after Ctrl-C", before, _names(problem.folder))
            if name != "tokenize":  # whose files are small
                yield from _without_room(trial, name, problem.folder, FEW, (*arguments, f"--output={new}"), str(new))
                (problem.base / TEMPLATE).write_text(" " * 2 * LARGE)
                yield from _without_room(trial, f"{name} with {TEMPLATE}", problem.folder, LARGE, (*arguments, f"--output={new}"), str(new))
                (problem.base / TEMPLATE).unlink()
        yield from _shards_without_room(trial, problem, rng)
        pretrain = ("pretrain", f"--model={problem.base}", f"--tokens={tokens}", "--seq=6", "--batch=2", "--save-every=1", "--epochs=2")
        at = 2 * int(rng.integers(1, 5)) + 1  # the flush of a state's content; that of its name is the next one
        yield from _full(trial, "train", full := problem.folder / "a full disk", at, train, of_train)
        named = int(rng.integers(1, 5))  # the first folder has the run's settings, the others a state before each step
        yield from _full(trial, "train", nameless := problem.folder / "names without room", named, train, codes[0], folders=True)
        yield from _full(trial, "export", problem.folder / "a name without room", 1, whole["export"], codes[1], folders=True)
        made = [len(metrics(output)) if (output / METRICS).exists() else 0 for output in (full, nameless)]
        yield from same("steps of runs whose state, or its name, has no room, up to that state", [at // 2 - 1, max(named - 2, 0)], made)
        yield from _full(trial, "pretrain", problem.folder / "another full disk", int(rng.integers(1, 6)), pretrain, of_pretrain)
        yield from _unread(trial, problem.folder, train, pretrain)
        yield from _metrics_without_room(trial, train, run, problem.folder / "no room for a line")
        yield from _state_without_room(trial, train, run, problem.folder / "no room for a state")
        yield from _told_how_to_go_on(trial, train, run, rng)
        for error in (KeyError("torn"), TypeError("torn"), AssertionError("torn")):
            name, output = type(error).__name__, problem.folder / f"a {type(error).__name__}"
            ask = partial(trial.commands.broken_off, problem.folder, error, SECOND_STEP, *train, f"--output={output}")
            yield trial.refuses(f"a {name} of a run's second step", ask, "torn", name)
        yield from _board_without_room(trial, train, problem.folder, rng)
        yield from _told_how_to_go_on(trial, pretrain, None, rng)
        reading = {
            "train": (*train, f"--output={problem.folder / 'new'}"),
            "predict": ("predict", f"--adapter={run}", "--", *texts, LARGE_TEXT),
        }
        reading["evaluate"] = ("evaluate", f"--adapter={run}", f"--corpus={corpus}")
        for name, arguments in reading.items():
            yield from _without_room(trial, name, problem.folder, int(rng.integers(1, 12)), arguments)
        yield from _ends(trial, reading["evaluate"])
        yield from _not_printed(
            trial,
            ("summary", f"--adapter={run}", f"--model={problem.base}"),
            (*reading["evaluate"], "--json"),
            reading["predict"],
            ("--help",),
            ("train", "--help"),
        )
        yield from _interrupted(trial, problem, pretrain, rng)


def _names(folder: Path) -> list[str]:
    """Every file and every folder in a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _unread(trial: Trial, folder: Path, *runs: tuple[object, ...]) -> Iterator[Comparison]:
    """A run whose output nobody reads any more, by which it breaks off, is not said to be done."""
    for arguments in runs:
        output = folder / f"{arguments[0]} that nobody reads"
        said = trial.commands.broken_off(
            folder, BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)), 1, *arguments, f"--output={output}"
        )
        if said.status == 0:
            yield broken(f"status of {arguments[0]} that breaks off because nobody reads it", "says that the run is done", "not 0", 0)


def _not_printed(trial: Trial, *commands: tuple[object, ...]) -> Iterator[Comparison]:
    """A command whose output cannot be written, or is read by nobody any more, is not said to be done, also where it is short.

    As a program of its own the first one ends with its status in each case, and so it does without what it needs.
    """
    name, *given = commands[0]
    with tempfile.NamedTemporaryFile() as file:
        for status, output, options in ((0, Path(file.name), given), (1, FULL, given), (4, Path(file.name), [])):
            yield from same(f"status of the program {name} {options}", status, trial.commands.program(output, name, *options))
    for name, *given in commands:
        for place, errors, code in ((FULL, "strict", errno.ENOSPC), (FULL, "replace", errno.ENOSPC), (None, "strict", errno.EPIPE)):
            said = trial.commands.not_printed(place, name, *given, errors=errors)
            what = f"end of {name} that prints to {place or 'a pipe without a reader'}, errors={errors}"
            yield from same(what, (1, True), (said.status, os.strerror(code) in said.err))


def _ends(trial: Trial, arguments: tuple[object, ...]) -> Iterator[Comparison]:
    """Each kind of error has its exit status, by which a supervisor starts a run again or not, and a message; a defect its traceback."""
    for status, kinds in STATUSES.items():
        for kind in kinds.split():
            said = trial.commands.ended_by(kind, *arguments)
            yield from same(f"end by {kind}", (status, "", True), (said.status, said.out, said.err.startswith(f"impl {arguments[0]}: ")))
    said = trial.commands.ended_by("RuntimeError", *arguments, message=NO_ROOM)
    yield from same("end by too little memory of the host", (1, True), (said.status, "memory is not enough" in said.err))
    ask = partial(trial.commands.ended_by, "RuntimeError", *arguments, message=ILLEGAL)
    yield trial.refuses("end by an illegal access", ask, "illegal memory access", "RuntimeError")
    for kind in DEFECTS.split():
        yield trial.refuses(f"end by {kind}", partial(trial.commands.ended_by, kind, *arguments), kind, kind)


def _without_room(trial: Trial, name: str, folder: Path, most: int, arguments: tuple[object, ...], where: str = "") -> Iterator[Comparison]:
    """A command that writes there, or that reads texts, where no file may grow beyond `most` bytes, nor the temporary ones that keep the
    texts."""
    before, where = _names(folder), where or tempfile.gettempdir()
    said = trial.commands.without_room(most, *arguments)
    yield from same(f"status and output of {name} without room", (1, ""), (said.status, said.out))
    yield from same(f"what {name} leaves without room", before, _names(folder))
    if not (TOO_LARGE in said.err and where in said.err):
        yield broken(f"message of {name} without room", "does not say what and where", f"{TOO_LARGE}, {where}", said.err[-300:])


def _shards_without_room(trial: Trial, problem: Small, rng: Generator) -> Iterator[Comparison]:
    """Tokens of which the first shard has no room, or its last bytes alone, fewer than a block."""
    (text := problem.folder / "long.txt").write_text("ls -l " * BLOCK)
    tokenize = ("tokenize", text, f"--model={problem.base}", "--end-token=1")
    trial.commands.run(*tokenize, f"--output={(whole := problem.folder / 'long')}")
    size = max(path.stat().st_size for path in whole.iterdir())
    for most in (size // 2, size - int(rng.integers(1, BLOCK))):
        new = problem.folder / "new shards"
        yield from _without_room(trial, f"tokenize of {size} bytes", problem.folder, most, (*tokenize, f"--output={new}"), str(new))


def _full(
    trial: Trial, name: str, output: Path, flush: int, arguments: tuple[object, ...], code: int, *, folders: bool = False
) -> Iterator[Comparison]:
    """A command whose disk takes nothing more from that flush on, with the error number `code`; with `folders`, no folder's names."""
    why, where = os.strerror(code), output.parent.name if folders else output.name
    said = trial.commands.broken_off(output.parent, OSError(code, why), flush, *arguments, f"--output={output}", folders=folders)
    yield from same(f"status of {name} <{why}>", 1, said.status)
    if not (why in said.err and where in said.err):
        yield broken(f"message of {name} <{why}>", "does not say what and where", f"{why}, {where}", said.err[-300:])
    yield from same(f"files that {name} leaves half written <{why}>", [], [path.name for path in output.rglob(".partial*")])


def _told_how_to_go_on(trial: Trial, arguments: tuple[object, ...], whole: Path | None, rng: Generator) -> Iterator[Comparison]:
    """Ctrl-C before a run has begun, and a little later: what the message says, --resume or the same command, makes the run.

    So does what is said of an error of the run, of which `whole` is the folder; a pre-training run has no message of its own there.
    """
    name, later = arguments[0], int(rng.integers(3, 7))  # from the first state on
    ends: list[tuple[BaseException, int, int]] = [(KeyboardInterrupt(), 2, 1)]
    ends += [] if whole is None else [(KeyboardInterrupt(), 2, later), (RuntimeError("torn"), 1, 1)]
    with tempfile.TemporaryDirectory() as parent:
        for place, (error, status, flush) in enumerate(ends):
            given = (*arguments, f"--output={(output := Path(parent) / str(place))}")
            said = trial.commands.broken_off(output.parent, error, flush, *given)
            half = [path.name for path in output.rglob(".partial*")]
            yield from same(f"status of {name} after {error!r} in its flush {flush}, files half written", (status, []), (said.status, half))
            trial.commands.run(*given, *(["--resume"] if "--resume" in said.err else []))
            if whole is not None:
                yield from same(f"metrics of {name} after {error!r} in its flush {flush}", metrics(whole), metrics(output))


def _board_without_room(trial: Trial, train: tuple[object, ...], folder: Path, rng: Generator) -> Iterator[Comparison]:
    """Where TensorBoard's folder has no room at the end, a run that ended well has failed, and names it; after Ctrl-C that is said."""
    full = OSError(code := int(rng.choice(DISK)), os.strerror(code))
    for interrupt, status, words in ((None, 1, (full.strerror, "full board")), (2, 2, ("step 2", "--resume"))):
        given = (*train, f"--output={folder / f'board {status}'}", f"--tensorboard={folder / 'full board'}")
        try:
            raise LookupError("after this the program starts the run")
        except LookupError:
            said, _ = trial.commands.shown(*given, interrupt=interrupt, closing=full)
        found = said.status, all(str(word) in said.err for word in words)
        yield from same(f"status of a run whose TensorBoard ends by {full}, and whether that is named", (status, True), found)


def _state_without_room(trial: Trial, train: tuple[object, ...], whole: Path, output: Path) -> Iterator[Comparison]:
    """A run whose first state has no room, though the smaller files before it have, has failed, and names the state."""
    small = max(path.stat().st_size for path in whole.iterdir() if path.suffix in (".json", ".yaml"))
    said = trial.commands.without_room(small + 64, *train, f"--output={output}")
    named = TOO_LARGE in said.err and "state.safetensors" in said.err
    yield from same("status of a run whose state has no room, and whether that is named", (1, True), (said.status, named))


def _metrics_without_room(trial: Trial, train: tuple[object, ...], whole: Path, output: Path) -> Iterator[Comparison]:
    """A run whose metrics have no room for a line, though all other files have: spaces make the first line longer than those files.

    Where there is no room to cut them, none is lost. The message names the file, no step or epoch is shown that was not written there, and
    the run goes on to the lines of a whole one.
    """
    given = (*train, f"--output={output}")
    trial.commands.broken_off(output.parent, KeyboardInterrupt(), SECOND_STEP, *given)
    lines, last = (output / METRICS).read_text().splitlines(), metrics(output)[-1]["step"]
    (output / METRICS).write_text("\n".join([lines[0].ljust(LARGE), *lines[1:], ""]))
    whole_lines = (output / METRICS).read_bytes()
    (output / METRICS).write_bytes(torn := whole_lines + b'{"kind": "st')
    said = trial.commands.without_room(LARGE, *given, "--resume")
    left = (output / METRICS).read_bytes() == torn
    yield from same("end of train without room to cut its metrics, and whether they are as they were", (1, True), (said.status, left))
    (output / METRICS).write_bytes(whole_lines)
    written, (*steps, epoch) = (output / METRICS).stat().st_size, (whole / METRICS).read_text().splitlines(keepends=True)[last:]
    room = {"a step": (9, rf"step (?!{last}/)\d+/.*"), "an epoch": (len("".join(steps)) + len(epoch) // 2, r"epoch .* done.*")}
    for line, (more, shown) in room.items():
        said = trial.commands.without_room(written + more, *given, "--resume")
        yield from same(f"status of train without room for {line}", 1, said.status)
        if not (TOO_LARGE in said.err and METRICS in said.err):
            named = f"{TOO_LARGE}, {METRICS}"
            yield broken(f"message of train without room for {line}", "does not say what and where", named, said.err[-300:])
        yield from same(f"what is shown and not written without room for {line}", [], re.findall(shown, said.err))
    trial.commands.run(*given, "--resume")
    yield from same("metrics after a line without room", metrics(whole), metrics(output))


def _interrupted(trial: Trial, problem: Small, pretrain: tuple[object, ...], rng: Generator) -> Iterator[Comparison]:
    """Ctrl-C in the first epoch of a pre-training run and in the second; then the command is given again, and once more when it is over.

    Each continuation shows those lines of a whole run that belong to the epochs which it ends itself.
    """
    whole, output = problem.folder / "whole", problem.folder / "interrupted"
    first, *epochs = trial.commands.run(*pretrain, f"--output={whole}").out.splitlines()
    asked = (*pretrain, f"--output={output}")
    for more, since, flush in (([], "", int(rng.integers(4, 9))), (["--resume"], "checkpoints", int(rng.integers(11, 15)))):
        said = trial.commands.broken_off(output.parent, KeyboardInterrupt(), flush, *asked, *more, since=since)
        yield from same("status of pretrain after Ctrl-C", 2, said.status)
        if not ("--resume" in said.err and str(output) in said.err):
            yield broken("message of pretrain after Ctrl-C", "does not say how to go on", f"--resume, {output}", said.err[-300:])
    for run, later in (("in its second epoch", epochs[1:]), ("at its end", [])):
        shown = trial.commands.run(*asked, "--resume").out.replace(str(output), str(whole)).splitlines()
        yield from same(f"lines of a run that goes on {run}", [first, *later], shown)
    yield from same("checkpoints of an interrupted run", *(content(each / "checkpoints") for each in (whole, output)))
    for config in sorted(output.glob(f"checkpoints/*/{CONFIG}")):
        yield from same("special tokens of a checkpoint", SPECIAL, {key: json.loads(config.read_text()).get(key) for key in SPECIAL})
