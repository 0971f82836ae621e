"""What everybody in a process shares beside memory: torch's settings, random numbers, and what belongs to the process itself."""

import os
import pickle
import random
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIGNALS = tuple(sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))
OF_TORCH = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_MODULE_LOADING")
"""Variables that torch sets when its compiler is first imported, and when it first uses a GPU."""
DEPTH_OF_TORCH = 2000
"""A limit of recursion up to which torch's compiler raises the process's when it first compiles."""
LIMITS = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))
Setting = tuple[Any, Callable[[Any], object]]
"""A value, and what puts it back."""


def torch_settings() -> dict[str, Any]:
    """torch's settings that change what others compute."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "precision of float32 products": torch.get_float32_matmul_precision(),
        "TF32 of cuBLAS": torch.backends.cuda.matmul.allow_tf32,
        "TF32 of cuDNN": torch.backends.cudnn.allow_tf32,
        "sums of bfloat16 products": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sums of float16 products": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "autocast": [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)],
        "number of active modes": torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack(),
        "search for anomalies": torch.is_anomaly_enabled(),
        "flushing of subnormal numbers": not torch.tensor(1e-310, dtype=torch.float64).mul(1.0).item(),
    }


def random_states() -> dict[str, Any]:
    """The states of the generators that everybody shares, by their owner."""
    numpy = pickle.dumps(np.random.get_state(legacy=False))  # noqa: NPY002  # the one that everybody shares
    found = {"torch": torch.get_rng_state().numpy().tobytes(), "numpy": numpy, "Python": random.getstate()}
    if torch.cuda.is_available():
        found["torch's CUDA"] = torch.cuda.get_rng_state().numpy().tobytes()
    return found


@contextmanager
def default_dtype(name: str) -> Iterator[None]:
    """That of the tensors which torch makes without being told a dtype, inside the block; some libraries set it for the process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def process_settings() -> dict[str, Setting]:
    """What belongs to the process, and what puts it back. Only the main thread has handlers of signals."""
    here = threading.current_thread() is threading.main_thread()
    return {
        **{f"handler of signal {each}": (signal.getsignal(each), partial(signal.signal, each)) for each in SIGNALS if here},
        "working directory": (_here(), os.chdir),
        "mask of new files' modes": (_umask(), os.umask),
        "limits of resources": ({name: resource.getrlimit(getattr(resource, name)) for name in LIMITS}, _put_back_limits),
        "limit of recursion": (max(sys.getrecursionlimit(), DEPTH_OF_TORCH), sys.setrecursionlimit),
        "environment": ({name: value for name, value in os.environ.items() if name not in OF_TORCH}, _put_back_environment),
        "answers of NumPy to errors": (np.geterr(), lambda were: np.seterr(**were)),
        "digits of an integer": (sys.get_int_max_str_digits(), sys.set_int_max_str_digits),
    }


def _here() -> Path | None:
    """The working directory; None where somebody has removed it."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def difference(before: Any, after: Any) -> str:
    """What is otherwise, in words. The values of a mapping are not told: the environment has secrets."""
    if isinstance(before, dict) and isinstance(after, dict):
        changed = sorted(str(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        return f"others at {', '.join(changed)}"
    return f"{before!r:.120} became {after!r:.120}"


def _umask() -> int:
    """The one of the process, which can only be read by setting another one."""
    os.umask(found := os.umask(0o077))
    return found


def _put_back_limits(before: dict[str, tuple[int, int]]) -> None:
    for name, limit in before.items():
        with suppress(OSError, ValueError):  # a hard limit that was lowered stays so
            resource.setrlimit(getattr(resource, name), limit)


def _put_back_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys() - {*OF_TORCH}:
        del os.environ[name]
    os.environ.update(before)
