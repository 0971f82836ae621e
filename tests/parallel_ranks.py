"""What a rank does in the tests of groups, in a process of its own."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from blackswan.impl.agreement import require_same, together
from blackswan.impl.group import Group


def collectives(group: Group, *_: Any) -> dict[str, Any]:
    own = torch.arange(6, dtype=torch.float32).view(2, 3) * 10**group.rank
    return {
        "sum": group.sum(own).numpy(),
        "empty": group.sum(torch.zeros(0)).numpy(),
        "rows": group.gather(torch.tensor([group.rank, -1])).numpy(),
        "texts": np.asarray(group.gather_text("ä" * group.rank)),
        # 1, 2⁻²⁴ and 2⁻²⁴: the first added to the others one by one is 1, the others first give more.
        "rounded": group.sum(torch.tensor([1.0 if group.rank == 0 else 2.0**-24])).numpy(),
    }


def failing(group: Group, _: torch.device, errors: Sequence[tuple[Exception, list[int]]]) -> dict[str, Any]:
    """What is raised here where each of the errors in turn is raised on some ranks."""
    raised = []
    for error, ranks in errors:
        try:
            with together(group):
                if group.rank in ranks:
                    raise error
        except Exception as found:
            raised.append(f"{type(found).__name__}: {found}")
    return {"raised": np.asarray(raised)}


def dying(group: Group, *_: Any) -> None:
    group.sum(torch.zeros(3))  # rank 0 has found the group too
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.sum(torch.zeros(3))


def disagreeing(group: Group, *_: Any) -> dict[str, Any]:
    require_same(group, "corpus", "the same")
    require_same(group, "corpus", str(group.rank))
    return {}
