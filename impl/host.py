"""The memory of this machine."""

import math
import os
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")


def available_memory() -> float:
    """Bytes that can be taken without pushing something out; infinite where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return float(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError, IndexError):
        try:
            return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (ValueError, OSError):
            return math.inf
