"""The memory of this machine, and of the container that this process runs in."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def available_memory() -> float:
    """Bytes that can be taken without pushing something out or being killed for it; infinite where the system does not say."""
    return min([_of_machine(), *map(_left, _groups())])


def _of_machine() -> float:
    try:
        return float(_named(_MEMINFO)["MemAvailable"]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (ValueError, OSError):
            return math.inf


def _groups() -> Iterator[Path]:
    """This process's control group and those above it, up to the container's own (cgroup v2)."""
    try:
        own = next(line[3:] for line in _OWN_GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, ValueError, StopIteration):
        return
    path = _GROUPS / own.strip("/")
    yield from (group for group in (path, *path.parents) if group.is_relative_to(_GROUPS))


def _left(group: Path) -> float:
    """What a group's limit leaves; infinite where it has none."""
    try:
        return max(0.0, float((group / "memory.max").read_text()) - _used(group))
    except (OSError, KeyError, ValueError):  # `max`, or no such file
        return math.inf


def _used(group: Path) -> float:
    """Bytes that a group has taken, without files that it keeps in memory and what else the kernel takes back."""
    kept = _named(group / "memory.stat")
    room = (float(kept.get(name, 0)) for name in ("active_file", "inactive_file", "slab_reclaimable"))
    return float((group / "memory.current").read_text()) - sum(room)


def _named(path: Path) -> Mapping[str, str]:
    """The first number beside each name of a file of the kernel's."""
    return {name.rstrip(":"): value for name, value, *_ in (line.split() for line in path.read_text().splitlines() if " " in line)}
