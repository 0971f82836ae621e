"""Commands whose output nobody reads to its end, or that has no room: never a success, and never a traceback."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from terminal_processes import ROOT

import blackswan.impl.__main__
from blackswan.contracts.output import READER_GONE
from blackswan.falsifiers.__main__ import main
from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.runner.workers import Workers

EVIDENCE = next((ROOT / "reports" / "evidence").glob("*.jsonl"))
COMMANDS = {
    "contracts --help": 2,
    "impl --help": 1,
    "contracts lint": 2,
    "contracts list": 2,
    f"reports check {EVIDENCE}": 2,
    "falsifiers depends": 2,
    f"impl summary --model {CHECKPOINT}": 1,
}


def ended(command: str, output: int, close: str = "") -> tuple[int, str]:
    """Exit status and errors of a command that writes its output at its end, as one into a pipe does."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    asked = ["sh", "-c", f'exec "$@" {close}', "sh", sys.executable, "-m", *command.split()]
    done = subprocess.run(asked, cwd=ROOT, stdout=output, stderr=subprocess.PIPE, env=environment, text=True, timeout=300, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_has_gone(command: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(command, writer) == (READER_GONE, "")
    finally:
        os.close(writer)


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--help" not in command])
def test_output_that_the_caller_has_closed_is_not_missed(command: str) -> None:
    assert ended(command, subprocess.DEVNULL, ">&-") == (0, "")


@pytest.mark.parametrize("command", ["contracts", "reports", "falsifiers"])
def test_ctrl_c_is_one_word(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    module = importlib.import_module(f"{command}.__main__")
    monkeypatch.setattr(module, "_run", interrupted)
    assert module.main(["anything"]) == module.INTERRUPTED == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("command", "status"), COMMANDS.items())
def test_a_disk_that_is_full(command: str, status: int) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    with full.open("wb") as output:
        found, error = ended(command, output.fileno())
    assert found == status
    assert "No space left on device" in error
    assert error.count("\n") == 1


def test_a_worker_that_has_gone_is_no_reader(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    start = Workers._start

    def and_die(self: Workers, count: int) -> None:
        start(self, count)
        for process in self.processes.values():
            process.kill()
            process.join()

    monkeypatch.setattr(Workers, "_start", and_die)
    assert main(["power", "--claim", "OP-RESIDUAL"]) == 2
    assert "a worker process ended before it answered, with exit status -9" in capsys.readouterr().err


def test_all_doors_say_it_alike() -> None:
    assert blackswan.impl.__main__.READER_GONE == READER_GONE
