"""Device names: `cpu | cuda | cuda:N | auto`."""

import re
import warnings

import torch

EXIT_STATUS = 6
_GRAMMAR = re.compile(r"cpu|auto|cuda(:(?P<index>0|[1-9][0-9]?))?")
MAX_INDEX = 15


class DeviceUnavailable(RuntimeError):  # noqa: N818  a state of the host, not a defect of the program
    """The device that was asked for by name is not there. A command ends with EXIT_STATUS."""


def parse_device(name: str) -> tuple[str, int | None]:
    """`cpu`, `cuda` or `auto` and the index, if any. Raises a ValueError for anything outside the grammar."""
    match = _GRAMMAR.fullmatch(name)
    index = match["index"] if match else None
    if match is None or (index is not None and int(index) > MAX_INDEX):
        raise ValueError(f"device {name!r}: expected cpu, cuda, cuda:N with N from 0 to {MAX_INDEX}, or auto")
    return name.partition(":")[0], None if index is None else int(index)


def resolve_device(name: str) -> torch.device:
    """The device of that name. Only `auto` falls back to the CPU, with one warning.

    Raises a ValueError for anything outside the grammar and DeviceUnavailable for a CUDA device that is not there.
    """
    kind, index = parse_device(name)
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "auto" and count == 0:
        warnings.warn("device auto: no CUDA device is available, using the CPU", stacklevel=2)
        return torch.device("cpu")
    if (index or 0) >= count:
        raise DeviceUnavailable(f"device {name!r}: this host has {count or 'no'} usable CUDA devices; use cpu or auto")
    # cuBLAS may otherwise add up the parts of a split sum in bfloat16, an error of the size of the terms and not of the result.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return torch.device("cuda", index or 0)


def set_tf32(allowed: bool) -> None:
    """Whether float32 matrix products on CUDA may round their operands to TF32 (10 bits of fraction); a run without a wish has it off."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
