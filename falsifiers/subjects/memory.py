"""Errors by which a device says that it has too little memory."""

import re
import sys

from blackswan.falsifiers.subjects.protocol import OutOfMemory

FULL = 1 << 28
"""Bytes. A GPU that has less free than this is full: cuDNN and cuBLAS want some for themselves."""
LIBRARIES = re.compile(r"cudnn|cublas|mha_graph", re.IGNORECASE)
"""What the errors of the libraries name which do not say what they lack."""


def short_of_memory(error: BaseException | None, device: str) -> bool:
    """Whether an error says that a GPU has too little memory. The errors of cuDNN and cuBLAS count where the device is full.

    Errors of torch, Triton and CUDA say "out of memory"; cuDNN's attention says only that its graph was not executed.
    """
    if not isinstance(error, RuntimeError) or not device.startswith("cuda"):
        return False
    if isinstance(error, OutOfMemory) or "out of memory" in str(error):
        return True
    torch = sys.modules.get("torch")  # the process that asks another one does without
    used = torch is not None and torch.cuda.is_initialized()
    return bool(used and LIBRARIES.search(str(error)) and torch.cuda.mem_get_info(device)[0] < FULL)  # type: ignore[union-attr]
