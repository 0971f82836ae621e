"""Every benchmark that is a command: how it ends when it is interrupted, and when what was given cannot be used."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks import command, data_parallel, step_inputs
from blackswan.impl.device import DeviceUnavailable

NEEDED = {"contenders": ["eager", "."]}
ON_GPU = {"attention": [], "contenders": NEEDED["contenders"], "device_speed": [], "kernels": [], "step_parts": [], "train_step": []}
OUTPUTS = {"attention": "--output", "data_parallel": "--output", "device_speed": "--json", "memory": "--json"} | {
    "reference_speed": "--output", "step_parts": "--output", "train_step": "--output",
}  # fmt: skip


def ended(name: str, options: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of a benchmark in this process."""
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *options])
    try:
        return command.run(import_module(f"benchmarks.{name}").main)
    except SystemExit as end:  # of argparse
        return int(end.code or 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="they would run")
@pytest.mark.parametrize("name", ON_GPU)
def test_a_host_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(name, ON_GPU[name], monkeypatch) == command.NO_DEVICE
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"benchmarks.{name}: ")
    assert "CUDA device" in err


@pytest.mark.parametrize("name", OUTPUTS)
def test_what_could_not_be_written_is_refused_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, expected in ((tmp_path / "nowhere" / "x.json", "there is no folder"), (tmp_path, "is a folder")):
        assert ended(name, [OUTPUTS[name], str(path)], monkeypatch) == command.BAD_INPUT
        assert expected in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("attention --only llama", "invalid choice: 'llama'"),
        ("attention --seq 0", "'0': expected a positive integer"),
        ("contenders nobody .", "invalid choice: 'nobody'"),
        ("data_parallel --device gpu", "device 'gpu': expected cpu, cuda, cuda:N"),
        ("data_parallel --batch -1", "'-1': expected a positive integer"),
        ("data_parallel --steps 3", "expected more than the 3 of the warm-up"),
        ("data_parallel --tolerance nan", "'nan': expected a finite number above 0"),
        ("device_speed --threads many", "'many': expected a positive integer"),
        ("diagnosis --mutant nobody", "no mutant is named 'nobody'"),
        ("diagnosis --processes 0", "'0': expected a positive integer"),
        ("diagnosis --honest -1", "'-1': expected a whole number from 0 on"),
        ("falsifier_overhead --claim NOBODY", "no claim is named 'NOBODY'"),
        ("falsifier_overhead --examples 0", "'0': expected a positive integer"),
        ("kernels --repeats 0", "'0': expected a positive integer"),
        ("learning --seeds one", "'one': expected a whole number from 0 on"),
        ("learning_choice --processes 0", "'0': expected a positive integer"),
        ("memory --device gpu", "device 'gpu': expected cpu, cuda, cuda:N"),
        ("reference_speed --layers 0", "'0': expected a positive integer"),
        ("step_parts --lengths mixed", "--lengths mixed: the least times are those of full sequences"),
        ("train_step --limit never", "'never': expected a finite number above 0"),
    ],
)
def test_bad_input(line: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    name, *options = line.split()
    assert ended(name, options, monkeypatch) == command.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (command.CannotRun("nothing to do", 1), 1, "benchmarks.x: nothing to do"),
        (FileNotFoundError(2, "No such file", "y"), 2, "benchmarks.x: [Errno 2] No such file: 'y'"),
        (DeviceUnavailable("no GPU"), 6, "benchmarks.x: no GPU"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), 2, "benchmarks.x: CUDA out of memory. Tried"),
    ],
)
def test_what_ends_a_benchmark_is_one_line(
    error: BaseException, status: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise error

    monkeypatch.setattr(sys, "argv", ["benchmarks/x.py"])
    assert command.run(main) == status
    assert capsys.readouterr().err == expected + "\n"


def test_a_defect_keeps_its_traceback() -> None:
    def main() -> int:
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        command.run(main)


def test_a_contender_gets_the_options_of_the_comparison() -> None:
    parser = argparse.ArgumentParser()
    step_inputs.add_options(parser)
    line = ["--model", "toy", "--batch", "3", "--seq", "7", "--lengths", "mixed", "--steps", "2", "--bf16"]
    for given in (line, line[:-1], []):
        options = parser.parse_args(given)
        assert parser.parse_args(step_inputs.arguments(options)) == options


@pytest.mark.parametrize(
    ("asked", "device", "reason", "expected"),
    [
        ("auto", "cuda", None, "fused"),
        ("auto", "cuda", "no Triton", "torch"),
        ("auto", "cpu", None, "torch"),
        ("torch", "cuda", None, "torch"),
        ("fused", "cuda", None, "fused"),
    ],
)
def test_workers_train_by_the_backend_that_training_takes(
    asked: str, device: str, reason: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_parallel, "why_not", lambda *_: reason)
    assert data_parallel._backend(argparse.Namespace(backend=asked, dtype="bfloat16"), torch.device(device)) == expected


def test_a_backend_that_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "why_not", lambda *_: "no Triton")
    with pytest.raises(command.CannotRun, match="--backend fused: no Triton"):
        data_parallel._backend(argparse.Namespace(backend="fused", dtype="bfloat16"), torch.device("cuda"))
