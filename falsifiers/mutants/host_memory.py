"""Wrong accounts of the memory that a host and its containers have: one step of `impl` replaced each."""

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

wrong_steps(
    "impl.operations.attention:available_memory",
    free_memory_for_available=("Memory that holds cached files counts as taken.", lambda _: _said("MemFree")),
    memory_in_all_for_available=("Memory that others have taken counts as there.", lambda _: _said("MemTotal")),
)


wrong_steps(
    "impl.operations.attention:LITTLE",
    memory_not_asked_for_long_texts=("Up to a TiB no host is asked: a run on long texts is killed by the system.", lambda _: 2**40),
)


wrong_steps(
    "impl.operations.attention:_require_room",
    memory_of_the_host_not_asked=("Attention takes what memory it can get.", lambda *_: None),
    memory_of_one_text=("Scores are counted for one text of a batch.", lambda room, q: room(q[:1])),
)


wrong_steps(
    "impl.host:_groups",
    containers_without_limits=("A container's limit is passed over.", lambda _: iter(())),
    limits_of_the_own_group_alone=("Limits of the groups above are passed over.", lambda groups: islice(groups(), 1)),
    limits_but_the_outermost=("The limit that a container itself has is passed over.", lambda groups: [*groups()][:-1]),
)


wrong_steps(
    "impl.host:_groups",
    groups_of_a_container_end_at_a_colon=(
        "The name of a container's group ends at its first colon.",
        lambda groups: (Path(str(group).partition(":")[0]) for group in groups()),
    ),
    groups_of_a_container_end_at_a_blank=(
        "The name of a container's group ends at its first blank.",
        lambda groups: (Path(str(group).partition(" ")[0]) for group in groups()),
    ),
)


@wrong_step("impl.host:_groups")
def limits_of_the_first_and_the_last_group(groups: Any) -> Any:
    """Limits of groups between a process's own and the outermost one below the root are passed over."""
    found = [*groups()]
    return [group for group in found if group in (found[0], *found[-2:])]


@wrong_step("impl.host:_groups")
def tightest_group_alone(groups: Any) -> Any:
    """Only that one of a container's groups is looked at whose limit is the smallest, which may not be the one with the least left."""

    def limit(group: Path) -> float:
        text = (group / "memory.max").read_text().strip() if (group / "memory.max").exists() else "max"
        return math.inf if text == "max" else float(text)

    return sorted(groups(), key=limit)[:1]


@wrong_step("impl.host:_used")
def limits_where_all_is_named(used: Any, group: Path) -> Any:
    """A limit is passed over where the kernel does not say how much of one kind it can take back."""
    if "slab_reclaimable" in (group / "memory.stat").read_text():
        return used(group)
    raise KeyError("slab_reclaimable")


wrong_steps(
    "impl.host:_used",
    usage_of_the_own_group_alone=("What others use of a limit further up is passed over.", lambda used, _: used(_own_group())),
)


wrong_steps(
    "impl.host:_named",
    by=lambda left_out: lambda named, path: {name: value for name, value in named(path).items() if name != left_out},
    kernels_memory_of_a_container_is_taken=("What the kernel can give back of a container's memory is no room.", "slab_reclaimable"),
    active_files_of_a_container_are_taken=("Files that a container has read more than once are no room.", "active_file"),
)


wrong_step("impl.host:_named", name="files_in_memory_alone_are_room", doc="Files that have no other place than memory count as room.")(
    lambda named, path: {**(found := named(path)), **({"active_file": found["file"]} if "file" in found else {})}
)


wrong_step("impl.host:_groups", name="groups_above_an_unseen_one_pass", doc="Where a process's own group is not seen, no limit holds.")(
    lambda groups: iter(found if (found := list(groups())) and found[0].exists() else [])
)


wrong_step(
    "impl.host:_named", name="files_of_a_container_are_taken", doc="Files that a container keeps in memory are no room for anything else."
)(lambda named, path: dict.fromkeys(named(path), "0") if path.name == "memory.stat" else named(path))


@wrong_step("impl.host:_of_machine")
def pages_in_all_for_free_ones(of_machine: Callable[[], float]) -> float:
    """All pages count, also those that others have taken, where the system does not say what is available."""
    from blackswan.impl import host

    ask, other = vars(host)["os"].sysconf, {"SC_AVPHYS_PAGES": "SC_PHYS_PAGES"}
    with patch.object(host, "os", SimpleNamespace(sysconf=lambda name: ask(other.get(name, name)))):
        return of_machine()


def _own_group() -> Path:
    from blackswan.impl import host

    return next(host._groups())


def _said(name: str) -> float:
    from blackswan.impl import host

    lines = dict(line.split(":", 1) for line in host._MEMINFO.read_text().splitlines())
    return float(lines[name].split()[0]) * 1024 if name in lines else float("inf")


wrong_step("impl.operations.attention:_require_room", name="room_for_every_head", doc="Room is asked for once for each head.")(
    lambda room, q: room(torch.empty(q.shape[0] * q.shape[2], q.shape[1], 1, 1))
)


@wrong_step("impl.host:_left")
def limits_of_a_group_without_a_soft_one_pass(left: Any, group: Path) -> Any:
    """A group that has no soft limit counts as one without any."""
    soft = group / "memory.high"
    return math.inf if soft.exists() and soft.read_text() == "max\n" else left(group)


@wrong_step("impl.host:_groups")
def groups_beside_a_container_pass(groups: Callable[[], Any]) -> Any:
    """A process in a group beside its container's own is in none, and the container's limit is passed over."""
    found = list(groups())
    return [] if any(".." in each.parts for each in found) else found
