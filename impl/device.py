"""Device names: `cpu | auto | KIND | KIND:N`, where KIND is a kind of accelerator by its torch name."""

import re
import warnings

import torch

from blackswan.contracts.tables import ACCELERATORS

EXIT_STATUS = 6
TESTED = ("cpu", "cuda")
"""Claims were asked on these, which `python -m reports evidence` shows. On others no verdict speaks of training."""
_GRAMMAR = re.compile(r"(?P<kind>[a-z][a-z_0-9]*?)(:(?P<index>0|[1-9][0-9]?))?")
MAX_INDEX = 15


class DeviceUnavailable(RuntimeError):  # noqa: N818  a state of the host, not a defect of the program
    """The device that was asked for by name is not there. A command ends with EXIT_STATUS."""


def parse_device(name: str) -> tuple[str, int | None]:
    """`cpu`, `auto` or the kind of accelerator, and the index, if any. Raises a ValueError for anything outside the grammar."""
    match, kinds = _GRAMMAR.fullmatch(name), _kinds()
    index = match["index"] if match else None
    alone = match is not None and index is None and match["kind"] in ("cpu", "auto")
    if match is None or not (alone or match["kind"] in kinds) or (index is not None and int(index) > MAX_INDEX):
        expected = f"cpu, {', '.join(f'{kind}, {kind}:N' for kind in kinds)} with N from 0 to {MAX_INDEX}, or auto"
        raise ValueError(f"device {name!r}: expected {expected}")
    return match["kind"], None if index is None else int(index)


def resolve_device(name: str) -> torch.device:
    """The device of that name. Only `auto`, which means CUDA, falls back to the CPU, with one warning.

    A GPU switches torch's sums of products in a narrow dtype off, for the whole process. Raises a ValueError for anything outside the
    grammar and DeviceUnavailable for a device that is not there.
    """
    kind, index = parse_device(name)
    if kind == "cpu":
        return torch.device("cpu")
    count = _present("cuda" if kind == "auto" else kind)
    if kind == "auto" and count == 0:
        warnings.warn("device auto: no CUDA device is available, using the CPU", stacklevel=2)
        return torch.device("cpu")
    if (index or 0) >= count:
        shown = "CUDA" if kind == "cuda" else kind
        raise DeviceUnavailable(f"device {name!r}: this host has {count or 'no'} usable {shown} devices; use cpu or auto")
    # cuBLAS may otherwise add up the parts of a split sum in bfloat16, an error of the size of the terms and not of the result.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return torch.device("cuda" if kind in ("auto", "hip") else kind, index or 0)


def _kinds() -> tuple[str, ...]:
    """Those with names, and the kind that `torch.accelerator` names on this host."""
    here = torch.accelerator.current_accelerator()
    return ACCELERATORS if here is None or here.type in ACCELERATORS else (*ACCELERATORS, here.type)


def _present(kind: str) -> int:
    """The number of usable devices of a kind."""
    if kind in ("cuda", "hip"):
        built = kind == "cuda" or torch.version.hip is not None
        return torch.cuda.device_count() if built and torch.cuda.is_available() else 0
    here = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if here is not None and here.type == kind and torch.accelerator.is_available() else 0


def set_tf32(allowed: bool) -> None:
    """Whether float32 matrix products on CUDA may round their operands to TF32 (10 bits of fraction); a run without a wish has it off."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
