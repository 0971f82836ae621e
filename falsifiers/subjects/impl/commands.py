"""The commands of `impl`, by their own main function: in this process, in one that is killed, and by workers."""

import errno
import io
import locale
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch leaves them out of what it exports

from blackswan.falsifiers.subjects.conversion import config_of
from blackswan.falsifiers.subjects.doors.commands import NOTHING, Opened, Said
from blackswan.falsifiers.subjects.doors.files import Label
from blackswan.falsifiers.subjects.doors.training import Kill, Rank
from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.impl.disks import limited
from blackswan.falsifiers.subjects.impl.kill_points import Event, KillPoints, file_events, flushes
from blackswan.falsifiers.subjects.impl.workers import Outcome, on_ranks
from blackswan.falsifiers.subjects.patching import standing_in
from blackswan.impl import __main__ as command
from blackswan.impl import progress
from blackswan.impl.agreement import WorkerFailed
from blackswan.impl.commands import COMMANDS, BadInput, TrainingFailed, common, evaluate
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.corpus import Sample
from blackswan.impl.device import DeviceUnavailable
from blackswan.impl.evaluation import ClassScore, Evaluation
from blackswan.impl.fit import StepRecord
from blackswan.impl.group import ALONE, Alone, Group, WorkerLost, joined
from blackswan.impl.ledger import InsufficientMemory
from blackswan.impl.metrics import MetricsFile
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.residency import NotResident
from blackswan.impl.warm_up import WarmUpFailed
from blackswan.reference.table import Array

Noted = tuple[str, float, int]
"""What TensorBoard is given: a tag, a value, the step."""
OF_THE_PROGRAM = (
    *(TrainingFailed, FloatingPointError, NotResident, torch.OutOfMemoryError, WarmUpFailed, WorkerFailed, WorkerLost, MemoryError),
    BrokenPipeError,
    *(DeviceUnavailable, InsufficientMemory, BadInput, ValueError, FileNotFoundError, KeyboardInterrupt),
    *(RuntimeError, TypeError, AssertionError, AttributeError),
)
ON_THE_HOST = ("export", "tokenize")
"""Commands that have no device."""


class Commands(Door):
    """The program `impl` as a user runs it."""

    def run(self, *arguments: object, stdin: bytes | None = b"", encoding: str | None = "utf-8", heard: bool = True) -> Said:
        """A command that does what it was asked, as `attempt` starts it. Raises a RuntimeError where it ends otherwise."""
        said = self.attempt(*arguments, stdin=stdin, encoding=encoding, heard=heard)
        if said.status:
            raise RuntimeError(f"{arguments[0]} ended with status {said.status}: {said.err.strip()[-600:]}")
        return said

    def train_as_of(self, parameters: int, *arguments: object) -> Said:
        """The command `train`, to which a checkpoint has so many parameters."""
        with standing_in(common.parameter_count, lambda _: parameters):
            return self.run("train", *arguments)

    def attempt(
        self,
        *arguments: object,
        stdin: bytes | None = b"",
        environment: Mapping[str, str] | None = None,
        temporary_files: bool = True,
        encoding: str | None = "utf-8",
        heard: bool = True,
    ) -> Said:
        """A command with whatever end, in which the environment has those variables too, perhaps without a folder for temporary files.

        The encoding of standard output may have a colon and its `errors` behind it. Without `heard` there is no standard error, as where a
        shell closes it, and with None for them no standard input and no standard output.
        """
        given = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        with (
            mock.patch.object(sys, "stdin", given),
            mock.patch.dict(os.environ, environment or {}),
            tempfile.TemporaryDirectory() as temporary,
            mock.patch.object(tempfile, "tempdir", temporary if temporary_files else str(Path(temporary) / "none")),
        ):
            said = _run(self._given(arguments), output=encoding, heard=heard)
            if left := [path.name for path in Path(temporary).iterdir() if path.is_file()]:
                raise RuntimeError(f"{arguments[0]} left {left[0]} among the temporary files")
        if given is not None and given.closed:
            raise RuntimeError(f"{arguments[0]} closed standard input, which is the process's own")
        return said

    def evaluation_of(self, confusion: Array, several: bool) -> tuple[dict[str, Any], list[str]]:
        """The JSON object and the lines of the tables that `evaluate` prints of that confusion matrix."""
        right = confusion[:, 3] if several else confusion.diagonal()
        claimed = confusion[:, 1] + confusion[:, 3] if several else confusion.sum(axis=0)
        support = confusion[:, 2] + confusion[:, 3] if several else confusion.sum(axis=1)
        scores = [
            ClassScore(found / max(own, 1), found / max(there, 1), 2 * found / max(own + there, 1), there)
            for found, own, there in zip(right.tolist(), claimed.tolist(), support.tolist(), strict=True)
        ]
        found = Evaluation(0.0, 0.0, 1, tuple(scores), tuple(map(tuple, confusion.tolist())))
        return evaluate.as_json(found), list(evaluate.lines(found, several))

    def shown(
        self,
        *arguments: object,
        columns: int = 0,
        variable: int = 0,
        pace: float = 1.0,
        board: bool = True,
        interrupt: int | None = None,
        closing: OSError | None = None,
    ) -> tuple[Said, list[Noted]]:
        """A command whose standard error is a terminal of so many columns, 0 for none, and what it gives to TensorBoard, if that is there.

        The terminal becomes a column narrower with each line that is drawn over another; standard output is a file. COLUMNS is
        `variable`, 0 as where it says nothing.

        The clocks go ahead by `pace` seconds, or up to half as many more, whenever one is looked at, as in a step of a large model. Ctrl-C
        comes when TensorBoard is given a number of the step `interrupt`, and the error `closing` when it writes what is left.
        """
        noted: list[Noted] = []
        there = SimpleNamespace(SummaryWriter=partial(_Board, noted, interrupt, closing)) if board else None
        real = time.perf_counter
        ahead = accumulate(pace * (1 + place % 3 / 4) for place in count())
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)
        terminal = _Terminal(columns)
        with (
            _module("torch.utils.tensorboard", there),
            mock.patch.dict(os.environ, COLUMNS=str(variable)),
            mock.patch.object(os, "get_terminal_size", terminal.size),
            mock.patch.object(time, "perf_counter", side_effect=lambda: real() + next(ahead)),
            mock.patch.object(time, "monotonic", side_effect=lambda: real() + next(ahead)),
        ):
            try:
                return _run(self._given(arguments), terminal if columns else io.StringIO()), noted
            finally:
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # another one that was left is for the trial to find
                    signal.signal(signal.SIGINT, usual)

    def durations(self, seconds: Sequence[float]) -> list[str]:
        """Times that are left as they are shown."""
        return [progress.duration(each) for each in seconds]

    def told(self, steps: Sequence[Mapping[str, Any]], epochs: int) -> str:
        """Returns the lines that a run shows of these steps, one for each."""
        stream = io.StringIO()
        shown = progress.Progress(stream, epochs=epochs, total_steps=2 * len(steps), log_interval=1)
        for step in steps:
            shown.step(StepRecord(**{name: value for name, value in step.items() if name != "kind"}))
        return stream.getvalue()

    def drawn(self, step: Mapping[str, Any], descriptor: bool) -> str:
        """What a step is drawn as on a terminal that says it has 0 columns, or on one without a descriptor, where COLUMNS says nothing."""
        terminal = _Terminal(0)
        number = nullcontext() if descriptor else mock.patch.object(terminal, "fileno", side_effect=io.UnsupportedOperation("fileno"))
        with number, mock.patch.object(os, "get_terminal_size", terminal.size), mock.patch.dict(os.environ, COLUMNS="0"):
            shown = progress.Progress(terminal, epochs=1, total_steps=10**9, log_interval=1)
            shown.step(StepRecord(**{name: value for name, value in step.items() if name != "kind"}))
        return terminal.getvalue()

    def broken_off(
        self, folder: Path, error: BaseException, flush: int, *arguments: object, since: str = "", folders: bool = False
    ) -> Said:
        """A command in which the flush number `flush` of files below the folder raises an error; flushes bring files to the disk.

        They are counted from the first one of a file that has `since` in its name; with `folders` those of folders are,
        whose names they bring there. An OSError is raised by all later ones too.
        """
        seen = list[str]()

        def event(name: str) -> None:
            if (
                name.startswith("flush ..")
                or not (seen or since in name)
                or (folders and not (folder / name.removeprefix("flush ")).is_dir())
            ):
                return
            seen.append(name)
            if len(seen) == flush or (len(seen) > flush and isinstance(error, OSError)):
                raise error

        with flushes(folder, event):
            return self.attempt(*arguments)

    def help(self, *arguments: str) -> Said:
        """Returns the help of the program, or of a command."""
        with redirect_stdout(io.StringIO()) as out:
            try:
                command.main([*arguments, "--help"])
            except SystemExit as end:
                return Said(int(end.code or 0), out.getvalue(), "")
        raise RuntimeError("no end of the program after its help")

    def ended_by(self, kind: str, *arguments: object, message: str | None = None) -> Said:
        """A command in which such an error is raised, with its name as the message where no other is given."""
        error = next(each for each in OF_THE_PROGRAM if each.__name__ == kind)
        made = error.__new__(error, message or kind)  # without what some have to know to be made
        name = str(arguments[0])
        failing = replace(COMMANDS[name], run=mock.Mock(side_effect=made))
        with mock.patch.dict(COMMANDS, {name: failing}):
            return self.attempt(*arguments)

    def overtaken(self, run: Path, output: Path, *arguments: object) -> Said:
        """A command that trains there; while its model is loaded another process leaves that run there."""
        load = ClassifyPipeline.from_pretrained

        def late(*given: Any, **named: Any) -> ClassifyPipeline:
            shutil.copytree(run, output, dirs_exist_ok=True)
            return load(*given, **named)

        with mock.patch.object(ClassifyPipeline, "from_pretrained", late):
            return self.attempt(*arguments, f"--output={output}")

    def not_allowed(self, folder: Path, *arguments: object) -> Said:
        """A command to whose user the system gives no right to write into that folder."""
        access, mkdir = os.access, os.mkdir

        def look(path: Any, mode: int, **how: Any) -> bool:
            return access(path, mode, **how) and not (mode & os.W_OK and Path(path).resolve() == folder.resolve())

        def make(path: Any, *given: Any, **how: Any) -> None:
            if Path(path).resolve().parent == folder.resolve():
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            mkdir(path, *given, **how)

        with mock.patch.multiple(os, access=look, mkdir=make):
            return self.attempt(*arguments)

    def without_room(self, most: int, *arguments: object) -> Said:
        """A command while no file may have more than so many bytes: a write that goes beyond is cut short, and the next one fails."""
        with limited(most):
            return self.attempt(*arguments)

    def not_printed(self, output: Path | None, *arguments: object, errors: str = "strict") -> Said:
        """A command whose standard output is that file, or where there is none a pipe that nobody reads any more. The status is 120 where
        Python, which writes at its end what a program has printed and not written, ends with that because it cannot."""
        if output is None:
            reader, number = os.pipe()
            os.close(reader)
        else:
            number = os.open(output, os.O_WRONLY)
        out, err = open(number, "w", encoding="utf-8", errors=errors), io.StringIO()  # noqa: PTH123, SIM115  its end may fail
        with redirect_stdout(out), redirect_stderr(err):
            try:
                status = command.main(self._given(arguments))
            except SystemExit as end:  # behind the help
                status = int(end.code or 0)
        try:
            out.close()
        except OSError:
            status = 120
        return Said(status, "", err.getvalue())

    def program(self, output: Path, *arguments: object) -> int:
        """The exit status of the program as a shell starts it, with its standard output in that file."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        program = [sys.executable, "-m", str(command.__package__), *map(str, arguments)]
        with output.open("wb") as out:
            return subprocess.run(program, stdout=out, stderr=subprocess.DEVNULL, env=environment, check=False).returncode  # noqa: S603

    def killed(self, folder: Path, kill: Kill | None, *arguments: object) -> Rank:
        """A command in a process of its own, which is killed at that event of the folder's files; its end and the events up to there."""
        (outcome,) = on_ranks(_watched, 1, (folder, kill, self._given(arguments)), self._device)
        return outcome.answer or Rank(outcome.ended, {}, [])

    def by_workers(
        self, workers: int, folder: Path, texts: Sequence[str], labels: Sequence[Label], *arguments: object, restarts: int = 0
    ) -> tuple[list[Said], list[Opened]]:
        """A command that several workers run together, as torchrun would start it after so many restarts, and then the answers of each
        about the folder, where there are texts.

        TensorBoard is there, and whoever writes for it leaves a file. On CUDA, where one GPU may be all there is, they find the group that
        is there, unless the arguments name a device.

        Raises a RuntimeError where one of them fails.
        """
        alone = torch.device(self._device).type == "cpu" or any(str(each).startswith("--device=") for each in arguments)
        said = _answers(on_ranks(_joined, workers, (self._given(arguments), restarts), self._device, by_environment=alone))
        return said, [] if not texts else _answers(on_ranks(_opened, workers, (folder, texts, labels), self._device))

    def read_of_earlier(self, attempts: int) -> list[bool]:
        """Whether each of so many starts finds what an earlier one has set, in torchrun's store, which outlives the workers."""
        kept, found = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), list[bool]()
        place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port)}

        def meet(*_: object, store: Store, **__: object) -> None:
            found.append(store.check(["address"]))
            store.set("address", "of one that dies")
            raise RuntimeError("nobody else comes")

        for attempt in range(attempts):
            given = place | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
            alone = mock.patch.object(distributed, "init_process_group", meet)
            with mock.patch.dict(os.environ, given), alone, suppress(WorkerLost), joined("cpu"):
                pass
        return found

    def opened(self, folder: Path, texts: Sequence[str], labels: Sequence[Label]) -> Opened:
        """The library's answers from an adapter or a merged model."""
        return _opened(ALONE, self._device, folder, texts, labels)

    def asked_groups(self, settings: Mapping[str, Any], **places: Path) -> dict[str, int]:
        """How often an evaluation asks the group with which a pipeline was opened there, by the name of the way."""
        config, found = ClassifyConfig.from_mapping(settings), dict[str, int]()
        label = (0,) * config.num_classes if config.multi_label else 0
        for way, place in places.items():
            group = _Asked()
            _by_a_way(way, place, settings, device=self._device, group=group).evaluate([Sample("ls", label)])
            found[way] = group.sums
        return found

    def masks(self, settings: Mapping[str, Any], **places: Path | Mapping[str, Any]) -> dict[str, list[bool]]:
        """The mask of the shorter of two texts as a pipeline that was opened there pads it, by the name of the way; that on random weights
        of an architecture also when it was saved and when it was merged."""
        opened = {way: _by_a_way(way, place, settings, device=self._device) for way, place in places.items()}
        with tempfile.TemporaryDirectory() as parent:
            for name in ("save", "merge"):
                getattr(opened["from_random"], name)(Path(parent) / name)
                opened[f"from_random, {name}"] = ClassifyPipeline.from_saved(Path(parent) / name, device=self._device)
        return {way: pipeline.tokens.batch(["a", "a longer text"])[1][0].tolist() for way, pipeline in opened.items()}

    def open_on(self, device: str, way: str, place: Path | Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Opens a pipeline there on a device of that name."""
        _by_a_way(way, place, settings, device=device)

    def library(self, call: str, folder: Path, *given: object, kernels: bool = True, threads: int | None = None) -> Array:
        """The answer to one call of the library, such as `predict` or `probabilities` of texts; also on a host that runs no kernels, or
        where torch computes with so many threads."""
        usual = torch.get_num_threads()
        torch.set_num_threads(threads or usual)
        try:
            with nullcontext() if kernels else mock.patch("blackswan.impl.kernels.why_not", return_value="this host has none"):
                return np.asarray(getattr(ClassifyPipeline.from_saved(folder, device=self._device), call)(*given))
        finally:
            torch.set_num_threads(usual)

    def _given(self, arguments: Sequence[object]) -> list[str]:
        """The arguments with the device where the command has one, before texts that are to be classified."""
        if not arguments:
            return []
        name, *rest = map(str, arguments)
        return [name, *([] if name in ON_THE_HOST else [f"--device={self._device}"]), *rest]


def _by_a_way(way: str, place: Path | Mapping[str, Any], settings: Mapping[str, Any], **named: Any) -> ClassifyPipeline:
    """A pipeline as the class method of that name opens a file or folder, or an architecture; with the settings where it takes any."""
    given = [ClassifyConfig.from_mapping(settings)] if way in ("from_pretrained", "from_apr", "from_random") else []
    opened: ClassifyPipeline = getattr(ClassifyPipeline, way)(place if isinstance(place, Path) else config_of(place), *given, **named)
    return opened


class _Asked(Alone):
    """A group of one worker that counts how often it is asked for a sum."""

    sums = 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return tensor


@contextmanager
def _module(name: str, module: Any) -> Iterator[None]:
    """Inside the block an import finds that module, or for None none; what else is imported there stays imported."""
    before = {name: sys.modules[name]} if name in sys.modules else {}
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        sys.modules.update(before)


class _Terminal(io.StringIO):
    """A terminal that becomes a column narrower whenever a line is drawn over another."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self._columns = columns

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2**20  # no file has this number

    def size(self, of: int = 1) -> os.terminal_size:
        if of != self.fileno():
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
        return os.terminal_size((self._columns, 24))

    def write(self, text: str) -> int:
        self._columns -= text.startswith("\r")
        return super().write(text)


class _Board:
    """In the place of TensorBoard's writer."""

    def __init__(
        self, noted: list[Noted], interrupt: int | None, closing: OSError | None, folder: str, purge_step: int | None = None
    ) -> None:
        self._noted, self._interrupt, self._closing = noted, interrupt, closing
        noted.append((f"opened {folder}", NOTHING if purge_step is None else float(purge_step), 0))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self._noted.append((tag, float(value), int(step)))
        if step == self._interrupt:
            self._interrupt = None
            signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        self._noted.append(("closed", 0.0, 0))
        if self._closing is not None:
            raise self._closing


def _events(folder: str, purge_step: int | None = None) -> mock.Mock:
    """In the place of TensorBoard's writer, whose file has the process's number."""
    del purge_step
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / f"events.{os.getpid()}").touch()
    return mock.Mock()


def _run(arguments: Sequence[str], err: io.StringIO | None = None, output: str | None = "utf-8", heard: bool = True) -> Said:
    written, (encoding, _, errors), err = io.BytesIO(), (output or "utf-8").partition(":"), err or io.StringIO()
    out = io.TextIOWrapper(written, encoding=encoding, errors=errors or "strict", newline="\n")
    with _in_ascii(), redirect_stdout(out if output else None), redirect_stderr(err if heard else None):
        status = command.main(arguments)
    if out.errors != (errors or "strict"):
        raise RuntimeError(f"{arguments[0]} left standard output, which is the process's own, with other errors: {out.errors}")
    out.flush()
    return Said(status, written.getvalue().decode(encoding, errors or "strict"), err.getvalue())


@contextmanager
def _in_ascii() -> Iterator[None]:
    """Inside the block a file that is opened without an encoding is read and written in ASCII, as in an environment without a locale."""
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        yield
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def _watched(group: Group, device: torch.device, folder: Path, kill: Kill | None, arguments: Sequence[str]) -> Rank:
    del group, device
    signal.signal(signal.SIGINT, signal.default_int_handler)
    by = signal.SIGINT if kill and kill.interrupt else signal.SIGKILL
    event = KillPoints(kill.event, kill.times, by) if kill else KillPoints()
    file_events(folder, event)
    with _lines(event):
        said = _run(arguments)
    return Rank(f"status {said.status}: {said.err}" if said.status else "", {}, event.seen)


@contextmanager
def _lines(event: Event) -> Iterator[None]:
    """Inside the block `event` is called before a line of the metrics is written, however long their file stays open."""

    def told(write: Callable[..., None]) -> Callable[..., None]:
        def tell(self: MetricsFile, record: Any) -> None:
            event("a line of the metrics")
            write(self, record)

        return tell

    with mock.patch.multiple(MetricsFile, step=told(MetricsFile.step), epoch=told(MetricsFile.epoch)):
        yield


def _joined(group: Group, device: torch.device, arguments: Sequence[str], restarts: int) -> Said:
    """The command finds the others by torchrun's environment; where NCCL would need a GPU for each, the group that is there.

    On a host that has GPUs it finds none where the subject is on the CPU.
    """
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # in a process of its own
    here = nullcontext() if group is ALONE else mock.patch("blackswan.impl.group.joined", return_value=nullcontext((group, device)))
    with here, _module("torch.utils.tensorboard", SimpleNamespace(SummaryWriter=_events)):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)  # in a process of its own
        said = _run(arguments)
    if said.status:
        raise RuntimeError(f"{arguments[0]} ended with status {said.status}: {said.err.strip()[-600:]}")
    return said


def _answers(outcomes: Sequence[Outcome]) -> list[Any]:
    """The workers' answers. Raises a RuntimeError where one of them failed."""
    if failed := [f"rank {rank}: {each.ended}" for rank, each in enumerate(outcomes) if each.answer is None]:
        raise RuntimeError("; ".join(failed))
    return [each.answer for each in outcomes]


def _opened(group: Group, device: torch.device, folder: Path, texts: Sequence[str], labels: Sequence[Label]) -> Opened:
    pipeline = ClassifyPipeline.from_saved(folder, device=device, group=group)
    samples = [Sample(text, tuple(label) if isinstance(label, list) else label) for text, label in zip(texts, labels, strict=True)]
    probabilities = np.asarray(pipeline.probabilities(texts))
    return Opened(np.asarray(pipeline.predict(texts)), probabilities, asdict(pipeline.evaluate(samples)), pipeline.encode(texts))
