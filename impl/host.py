"""The memory of this machine, and of the container that this process runs in."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Bytes that can be taken without pushing something out or being killed for it; infinite where the system does not say."""
    return min(_of_machine(), *_of_containers())


def _of_machine() -> float:
    try:
        return float(_named(_MEMINFO)["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (ValueError, OSError):
            return math.inf


def _of_containers() -> Iterator[float]:
    """What the limits of this process's control group and of those above it leave (cgroup v2). Files that they keep in memory are room."""
    yield math.inf
    try:
        own = next(line[3:] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return
    path = _GROUPS / own.strip("/")
    for group in (path, *path.parents):
        if not group.is_relative_to(_GROUPS):
            return
        try:
            limit, used = (float((group / name).read_text()) for name in ("memory.max", "memory.current"))
            kept = _named(group / "memory.stat")
            yield max(0.0, limit - used + float(kept["active_file"]) + float(kept["inactive_file"]))
        except (OSError, KeyError, ValueError):  # `max`, or a group that has no limit of its own
            continue


def _named(path: Path) -> Mapping[str, str]:
    """The first number beside each name of a file of the kernel's."""
    return {name.rstrip(":"): value for name, value, *_ in (line.split() for line in path.read_text().splitlines() if " " in line)}
