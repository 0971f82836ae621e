"""A watchdog: attacks claims in a process of its own, which is killed when a claim's time is up, for native code heeds no signal.

The process is started anew (spawned), since threads and CUDA do not survive a fork, and kept from claim to claim, since it imports torch.
"""

import multiprocessing
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from blackswan.contracts.model import Claim
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.strategies import Draw, build
from blackswan.falsifiers.runner.engine import Options, Source, falsify
from blackswan.falsifiers.runner.verdict import State, Verdict
from blackswan.falsifiers.subjects.protocol import Subject

START_SECONDS = 120.0
"""What a new process may take to import everything; it counts against no claim."""


@dataclass
class Watchdog:
    """Gives the verdict of `falsify`, or VACUOUS where there is none after `limit` seconds, or where the process died.

    Not FALSIFIED: no answer was seen to be wrong, and it may be the reference that hangs. Not NOT_RUN, which fails no run. Not FLAKY:
    nothing was answered twice. VACUOUS is what is true: the attack proved nothing, and that fails the run.
    """

    subject: Subject
    options: Options
    limit: float
    _process: SpawnProcess | None = None
    _pipe: "Connection[Any, Any] | None" = field(default=None, repr=False)

    def falsify(self, claim: Claim, dtype: str, source: Source | None = None) -> Verdict:
        """The verdict on a claim in a dtype."""
        pipe, last = self._started(), "before the first case"
        pipe.send((claim, dtype, source))
        end = time.monotonic() + self.limit
        try:
            while pipe.poll(max(0.0, end - time.monotonic())):
                message = pipe.recv()
                if isinstance(message, Verdict):
                    return message
                last = f"on {message}"
        except (EOFError, ConnectionResetError):
            return self._given_up(claim, dtype, f"the attacking process died {last}")
        return self._given_up(claim, dtype, f"no verdict within {self.limit:g} s; stopped {last}")

    def close(self) -> None:
        """Kills the process, where there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def _given_up(self, claim: Claim, dtype: str, reason: str) -> Verdict:
        assert self._process is not None
        self._process.join(1.0)
        status = self._process.exitcode
        self.close()
        died = "" if status is None else f" ({signal.Signals(-status).name if status < 0 else f'exit status {status}'})"
        return Verdict(claim, dtype, self.subject.device, State.VACUOUS, reason + died)

    def _started(self) -> "Connection[Any, Any]":
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, self.subject, self.options), daemon=True)
            self._process.start()
            theirs.close()
            if not self._pipe.poll(START_SECONDS):
                self.close()
                raise TimeoutError(f"the attacking process did not start within {START_SECONDS:g} s")
            self._pipe.recv()
        assert self._pipe is not None
        return self._pipe


def _serve(pipe: "Connection[Any, Any]", subject: Subject, options: Options) -> None:
    """Attacks what is asked for; says each case before it attacks it. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send("ready")
    while True:
        try:
            claim, dtype, source = pipe.recv()
        except EOFError:
            return
        pipe.send(falsify(claim, dtype, subject, options, _Announced(pipe, source or build)))


@dataclass(frozen=True)
class _Announced:
    """Builds cases, and says which."""

    pipe: "Connection[Any, Any]"
    build: Source

    def __call__(self, claim: Claim, draw: Draw, flavour: str, dtype: str) -> Case:
        self.pipe.send(f"sizes {dict(draw.sizes)}, scalars {dict(draw.scalars)}, seed {draw.seed}, flavour {flavour}")
        return self.build(claim, draw, flavour, dtype)
