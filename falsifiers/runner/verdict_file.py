"""The verdict file of a run: its header, a record a line as verdicts are reached, the totals at the end; and going on with an older one."""

import datetime
import fcntl
import json
import os
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from blackswan.falsifiers.runner import environment
from blackswan.falsifiers.runner.campaign import Campaign, Key
from blackswan.falsifiers.runner.verdict import State, plain
from blackswan.reports.digests import sealed
from blackswan.reports.records import SCHEMA_VERSION, RecordError, read
from blackswan.reports.render import FORMATS, is_page

EVIDENCE = environment.ROOT / "reports" / "evidence"
SAME = ("subject", "device", "effort", "seed", "model", "corpus", "digests", "versions")
"""Keys of the header that must be equal for a verdict of an older run to be one of this run."""
Record = Mapping[str, Any]


class UnwrittenError(Exception):
    """A verdict was reached and could not be written: whatever the others are, the file does not tell."""


def writable(path: Path) -> Path:
    """ValueError where the verdict file cannot be written, or it or a page of its report would replace what no run may make anew."""
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if (path.exists() and not path.is_file()) or not nearest.is_dir() or not os.access(path if path.exists() else nearest, os.W_OK):
        raise ValueError(f"--verdicts: {path} cannot be written; expected a file in a folder that can be written to")
    if path.suffix.removeprefix(".").lower() in FORMATS:
        raise ValueError(f"--verdicts: {path} has the name of a page of the report; expected another suffix, such as {path.stem}.jsonl")
    if path.exists() and path.resolve().is_relative_to(EVIDENCE.resolve()):
        raise ValueError(f"--verdicts: {path} is kept evidence, which no run replaces; name another file")
    if path.exists() and not _starts_with_a_run(path):
        raise ValueError(
            f"--verdicts: {path} is no verdict file, and would be replaced; expected a new file, or one that a run has written"
        )
    for format_ in FORMATS:
        page = path.parent / f"{path.stem}.{format_}"
        if page.exists() and not is_page(page, format_):
            raise ValueError(f"--verdicts: {page} is no page of a report, and would be replaced by one; expected another name than {path}")
    if path.exists():
        with path.open("r+b") as stream:
            _lock(stream, path)
    return path


def _starts_with_a_run(path: Path) -> bool:
    with path.open("rb") as stream:
        first = stream.readline()
    # A run that was killed, or a full disk, may have left nothing or the first half of a line.
    if not first or first.startswith(b'{"record": "run"'):
        return True
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("record") == "run"


def _lock(stream: IO[Any], path: Path) -> None:
    """Keeps other runs from the file until the stream is closed. ValueError where another run has it."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--verdicts: {path} is being written by another run; wait for its end, or name another file") from None


class VerdictFile:
    """The records of a campaign: those of an older run that are kept, and those that are added as verdicts are reached."""

    def __init__(self, campaign: Campaign, replayed: Path | None = None) -> None:
        self.campaign, self.path, self.replayed = campaign, campaign.verdict_file, replayed
        self.records: dict[Key, Record] = {}
        self._former: dict[Key, Record] = {}
        self._stream: IO[str] | None = None
        self._digests: list[str] = []

    @property
    def is_open(self) -> bool:
        """Whether records can be written."""
        return self._stream is not None

    def resume(self) -> None:
        """Takes over what held in the verdict file of an interrupted run; none where there is no file yet.

        Raises a ValueError where the file is of another run: other code, versions, device, effort, seed or input, or a replay.
        """
        if not self.path.exists():
            return
        try:
            run = read(self.path)
        except RecordError as error:
            raise ValueError(f"--resume: {error}") from None
        before, now = {**run.header}, self.header()
        if "replay" in before:
            raise ValueError(f"--resume: {self.path} is of a replay of one stored case, no attack on a claim; run without --resume")
        for key in SAME:
            if before.get(key) != now.get(key):
                raise ValueError(
                    f"--resume: {self.path} is of a run with other {key}; run without --resume, or with another --verdicts file"
                )
        self._former = {_key(record): {**record} for record in run.verdicts}
        self.records = {key: record for key, record in self._former.items() if record["state"] == State.HELD}
        self.campaign.held = set(self.records)

    def open(self) -> None:
        """Starts the file with the run's record, and what was taken over. ValueError where another run has it, OSError, UnwrittenError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        stream = self.path.open("a", encoding="utf-8")
        _lock(stream, self.path)
        stream.truncate(0)
        self._stream, self._digests = stream, []
        for record in (self.header(), *self.records.values()):
            self._write(record)

    def add(self, record: Record) -> None:
        """Writes the record of a verdict, which readers see at once. UnwrittenError where it cannot be written, after which nothing is."""
        self._write(record)
        self.records[_key(record)] = record

    def keep_the_rest(self) -> None:
        """Takes over what did not hold in the run that is resumed and was not attacked again: no verdict is lost by selecting less."""
        for key, record in self._former.items():
            if key not in self.records:
                self.add(record)

    @property
    def failures(self) -> list[Record]:
        """The records that are no success."""
        return [record for record in self.records.values() if self.campaign.fails(record)]

    def close(self, exit_status: int, interrupted: bool) -> None:
        """Ends the file with the totals."""
        if self._stream is None:
            return
        totals = Counter(record["state"] for record in self.records.values())
        counts = {state.value: totals[state.value] for state in State}
        end = {"record": "end", "finished": _now(), "interrupted": interrupted, "exit_status": int(exit_status), "totals": counts}
        self._write(end)
        self._stream.close()
        self._stream = None

    def header(self) -> dict[str, Any]:
        """The run's record."""
        campaign = self.campaign
        subject, options, real_input = campaign.subject, campaign.options, campaign.real_input
        dtypes = {target.dtype for target in campaign.targets()} | {record["dtype"] for record in self.records.values()}
        record: dict[str, Any] = plain(
            {
                "record": "run",
                "schema": SCHEMA_VERSION,
                "run": str(uuid.uuid4()),
                "subject": subject.name,
                "device": subject.device,
                "device_name": environment.device_name(subject.device),
                "dtypes": sorted(dtypes),
                "effort": options.effort,
                "seed": options.seed,
                "started": _now(),
                "command": environment.command(),
                **({"replay": environment.display_path(self.replayed)} if self.replayed else {}),
                **({"sources": sources} if (sources := subject.sources()) else {}),
                "versions": environment.versions(subject.device),
                "machine": environment.machine(),
                "model": _described(real_input.model),
                "corpus": _described(real_input.corpus),
                "digests": environment.digests() if subject.name == "impl" else {**environment.digests(), "impl": None},
            }
        )
        return record

    def _write(self, record: Record) -> None:
        assert self._stream is not None
        try:
            self._stream.write(json.dumps(sealed(plain(record), self._digests), ensure_ascii=False, allow_nan=False) + "\n")
            self._stream.flush()
        except OSError as error:
            with suppress(OSError):  # what is left in the buffer cannot be written either
                self._stream.close()
            self._stream = None
            raise UnwrittenError(f"{self.path} cannot be written: {error.strerror or error}; what was written before stands") from None


def _key(record: Record) -> Key:
    return record["claim"], record["dtype"], record["device"].split(":")[0]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _described(path: Path) -> dict[str, str]:
    return {"path": environment.display_path(path), "digest": environment.file_digest(path)}
