"""Groups of real processes: sums in order, errors on all ranks, a dead worker noticed; torchrun's environment and its restarts."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import parallel_ranks
import pytest
import torch

from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.subjects.impl import workers
from blackswan.falsifiers.subjects.impl.workers import Outcome
from blackswan.impl.agreement import fingerprint, together
from blackswan.impl.device import DeviceUnavailable
from blackswan.impl.group import ALONE, WorkerLost, joined, restarted, shard

ROOT = Path(__file__).parents[1]
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def on_ranks(function: Callable[..., Any], *arguments: Any, size: int = 2) -> list[Outcome]:
    return workers.on_ranks(function, size, arguments, "cpu")


def test_collectives_of_three() -> None:
    """Terms are added in the order of the ranks: 1 and then two numbers that alone would be rounded away."""
    outcomes = on_ranks(parallel_ranks.collectives, size=3)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    for outcome in outcomes:
        answer = outcome.answer
        np.testing.assert_array_equal(answer["sum"], np.arange(6).reshape(2, 3) * 111.0)
        np.testing.assert_array_equal(answer["rows"], [[0, -1], [1, -1], [2, -1]])
        assert answer["texts"].tolist() == ["", "ä", "ää"]
        assert answer["empty"].shape == (0,)
        assert answer["rounded"].tolist() == [1.0]


ERRORS: list[tuple[Exception, list[int], str]] = [
    (FloatingPointError("nothing finite"), [1], "FloatingPointError: rank 1 of 2: nothing finite"),
    (ValueError("bad \udcff label"), [0, 1], "ValueError: rank 0 of 2: bad \\udcff label (also on rank 1)"),
    (KeyError("name"), [0], "WorkerFailed: rank 0 of 2: 'name'"),
    (torch.OutOfMemoryError("full"), [1], "WorkerFailed: rank 1 of 2: full"),
    (FileNotFoundError(2, "No such file", "x"), [0], "FileNotFoundError: rank 0 of 2: [Errno 2] No such file: 'x'"),
]


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    for outcome in on_ranks(parallel_ranks.failing, [(error, ranks) for error, ranks, _ in ERRORS]):
        assert outcome.answer["raised"].tolist() == [expected for _, _, expected in ERRORS]


def test_a_dead_worker_is_noticed_and_the_next_group_works() -> None:
    alive, dead = on_ranks(parallel_ranks.dying)
    assert dead.signal == signal.SIGKILL
    assert alive.error == "WorkerLost"
    assert "rank 0 of 2 lost another worker during a gather" in alive.message
    for outcome in on_ranks(parallel_ranks.disagreeing):  # the next group works, and refuses another corpus on one of its workers
        assert (outcome.error, outcome.message) == ("ValueError", "rank 1: another corpus than that of rank 0; give every worker the same")


def test_fingerprints() -> None:
    vector = torch.randn(1000, dtype=torch.float64)
    seen = {int(fingerprint(vector))}
    for index in range(0, 1000, 97):
        other = vector.clone()
        other.view(torch.int64)[index] ^= 1 << (index % 64)
        seen.add(int(fingerprint(other)))
    swapped = vector.clone()
    swapped[0], swapped[1] = vector[1], vector[0]
    seen |= {int(fingerprint(swapped)), int(fingerprint(-vector)), int(fingerprint(vector[:-1]))}
    assert len(seen) == 1 + 11 + 3
    assert int(fingerprint(vector.view(10, 100))) == int(fingerprint(vector))
    assert int(fingerprint(torch.zeros(3).bfloat16())) == 0
    assert fingerprint(torch.tensor(7)).shape == ()


def test_alone_nothing_is_exchanged() -> None:
    tensor = torch.randn(3)
    assert ALONE.sum(tensor) is tensor
    assert ALONE.gather(tensor).shape == (1, 3)
    assert ALONE.gather_text("x") == ["x"]
    with pytest.raises(KeyError, match="as it was"), together(ALONE):
        raise KeyError("as it was")
    with joined("cpu", environment={}) as (group, device):
        assert (group, device) == (ALONE, torch.device("cpu"))


def test_a_rank_outside_the_group_has_no_share() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2 workers: expected a rank from 0 to 1"):
        shard([1], 2, 2)


@pytest.mark.parametrize(
    ("changes", "device", "error", "message"),
    [
        ({"WORLD_SIZE": None}, "cpu", ValueError, "has RANK, LOCAL_RANK, but not WORLD_SIZE: start the workers with torchrun"),
        ({"MASTER_PORT": None}, "cpu", ValueError, "but not MASTER_PORT"),
        ({"RANK": "-1"}, "cpu", ValueError, "RANK='-1': expected a whole number"),
        ({"RANK": "2"}, "cpu", ValueError, "RANK=2, WORLD_SIZE=2, LOCAL_RANK=0: expected"),
        ({"LOCAL_RANK": "1"}, "cpu", ValueError, "LOCAL_RANK ≤ RANK"),
        ({}, "cuda:1", ValueError, "'cuda:1' names one GPU for 2 workers: use cuda"),
        ({}, "gpu", ValueError, "device 'gpu': expected"),
    ],
)
def test_an_environment_that_makes_no_sense(changes: dict[str, str | None], device: str, error: type[Exception], message: str) -> None:
    environment = {name: value for name, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(error, match=message), joined(device, environment=environment):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without CUDA")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(DeviceUnavailable, match="cuda:0"), joined("cuda", environment=TORCHRUN):
        pass


def test_workers_that_do_not_come() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerLost, match="rank 1 of 2 found no group"), joined("cpu", timeout=1.0, environment={**TORCHRUN, "RANK": "1"}):
        pass
    assert time.monotonic() - start < 30


def test_restarted() -> None:
    assert not restarted({})
    assert not restarted({"TORCHELASTIC_RESTART_COUNT": "0"})
    assert restarted({"TORCHELASTIC_RESTART_COUNT": "2"})


# The command under torchrun, with a worker killed. That nothing changes by it, bit for bit, is claimed by DP-KILLED-RESUMES.


def free_port() -> int:
    """A free port below those that the kernel gives to connections: torchrun opens it seconds later, and others connect meanwhile."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as asked, contextlib.suppress(OSError):
            asked.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def torchrun(output: Path, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """`impl train` on two workers. Whatever becomes of the test, torchrun and its workers do not outlive it."""
    corpus = output.parent / "corpus.jsonl"
    corpus.write_bytes(b"".join(CORPUS_HELDOUT.read_bytes().splitlines(keepends=True)[:40]))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "--master-port", str(free_port())),
        *("-m", "impl", "train", "--model", str(CHECKPOINT), "--corpus", str(corpus), "--output", str(output)),
        *("--num-classes", "5", "--batch-size", "2", "--accumulation-steps", "2", "--max-seq-len", "16"),
        *("--lora-rank", "2", "--save-every", "2", *options),
    ]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.terminate()


def steps(output: Path) -> list[int]:
    """The steps that the run has written down."""
    path = output / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.is_file() else []
    return [row["step"] for row in rows if row["kind"] == "step"]


def last_worker(parent: int) -> int:
    """The process number of torchrun's second worker."""
    return max(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_worker(entry, parent))


def _is_worker(process: Path, parent: int) -> bool:
    try:
        status, command = (process / "stat").read_text(), (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return False
    return int(status.rpartition(")")[2].split()[1]) == parent and b"impl" in command


NCCL = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes a GPU for each worker")


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="needs /proc")
@pytest.mark.parametrize(("device", "epochs"), [("cpu", 4), pytest.param("cuda", 80, marks=NCCL)])
def test_torchrun_restarts_a_killed_worker_and_no_step_is_lost_or_doubled(tmp_path: Path, device: str, epochs: int) -> None:
    # So many epochs of nine steps that the run goes on for seconds after the fifth step, which takes the CPU 50 ms, a GPU a few.
    output, end = tmp_path / "run", time.monotonic() + 120
    with torchrun(output, "--device", device, "--epochs", str(epochs)) as run:
        while len(steps(output)) < 5 and run.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        assert run.poll() is None, run.communicate()[0].decode()
        assert len(steps(output)) >= 5, "the run has not come to its fifth step"
        os.kill(last_worker(run.pid), signal.SIGKILL)
        text = run.communicate(timeout=300)[0].decode()
    assert run.returncode == 0, text
    assert text.count("samples:") == 2, "the worker was killed after the end"
    assert "Traceback" not in text
    assert steps(output) == list(range(1, 9 * epochs + 1))
    assert {"last", "best"} <= {path.name for path in output.iterdir()}
