"""`python -m benchmarks.attackers seen --function token_shards`: the kinds of value that the claims on a CPU give to functions of `impl`.

A mistake that shows for another kind of value is found by no claim: for a tensor with strides where none had any, for an empty text, for
more samples than any claim has. A line has a function, one of its arguments, and each kind with the largest size that was seen of it:
`int to 2^6` is a number below 64, `list to 2^3` has fewer than eight entries. After the first 4,000 calls of a function in a claim one call
in 97 is looked at. What other processes call is not seen.
"""

import argparse
import math
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Sized
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch

from benchmarks.attackers import chance
from blackswan.falsifiers.runner.campaign import Target
from blackswan.falsifiers.runner.options import cores
from blackswan.falsifiers.runner.workers import answers

PACKAGE = "blackswan."
EVERY, THEN_EVERY = 4_000, 97
"""So many calls of a function are looked at, and of those after them one in so many."""
Seen = dict[tuple[str, str], dict[str, int]]
"""By function and argument: kind → the exponent of 2 of the largest."""


def kinds(value: object) -> Iterator[tuple[str, int]]:
    """The kinds of a value, and the number of binary digits of its size: of a number itself, of a tensor its elements, else its length."""
    if value is None or isinstance(value, bool | torch.dtype | torch.device):
        yield str(value), 0
    elif isinstance(value, torch.Tensor | np.ndarray):
        size = math.prod(value.shape)
        yield str(value.dtype).removeprefix("torch.") if size else "no elements", size.bit_length()
        if not (value.is_contiguous() if isinstance(value, torch.Tensor) else value.flags.c_contiguous):
            yield "with strides", size.bit_length()
    elif isinstance(value, int):
        yield "int below zero" if value < 0 else "int" if value else "0", value.bit_length()
    elif isinstance(value, float):
        yield next(name for name, is_so in _FLOATS.items() if is_so(value)), 0
    elif isinstance(value, str):
        yield "text not in ASCII" if not value.isascii() else "text" if value else "empty text", len(value).bit_length()
    elif isinstance(value, Sized) and not isinstance(value, type):
        yield type(value).__name__ if len(value) else f"empty {type(value).__name__}", len(value).bit_length()
    else:
        yield type(value).__name__, 0


_FLOATS = {"NaN": math.isnan, "infinite": math.isinf, "0.0": lambda value: value == 0, "below 0.0": lambda value: value < 0, "float": bool}


def given(target: Target) -> tuple[str, Seen]:
    """How a claim ended while it was looked at, and the values that it gave to functions of `impl` in this process."""
    seen, calls = defaultdict[tuple[str, str], dict[str, int]](dict), Counter[str]()

    def look(frame: FrameType, event: str, _: Any) -> None:
        module, code = frame.f_globals.get("__name__", ""), frame.f_code
        if event != "call" or not module.startswith(f"{PACKAGE}impl") or "<" in (code.co_name[0], code.co_filename[0]):
            return  # neither a function without a name nor one without a source
        name = f"{module.removeprefix(PACKAGE)}:{code.co_qualname}"
        calls[name] += 1
        if calls[name] > EVERY and calls[name] % THEN_EVERY:
            return
        for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            if argument not in ("self", "cls") and argument in frame.f_locals:
                own = seen[name, argument]
                for kind, size in kinds(frame.f_locals[argument]):
                    own[kind] = max(size, own.get(kind, 0))

    asking = chance.Asking(target)
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        outcome = asking.outcome(nullcontext())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as `sys`
    return outcome, dict(seen)


def main(arguments: Sequence[str]) -> int:
    """Prints the lines of the functions whose name has the text."""
    options = _options(arguments)
    seen, chosen = defaultdict[tuple[str, str], dict[str, int]](dict), chance.asked_on_cpu(options.claim)
    looked_at = answers([partial(given, target) for target in chosen], options.jobs, in_order=True)
    for target, (outcome, found) in zip(chosen, looked_at, strict=True):
        if outcome != chance.SURVIVED:
            print(f"{target.claim.id} {target.dtype} ended early ({outcome}): only a part of its values is listed", file=sys.stderr)
        for place, sizes in found.items():
            seen[place] = {kind: max(size, seen[place].get(kind, 0)) for kind, size in {**seen[place], **sizes}.items()}
    for (name, argument), sizes in sorted(seen.items()):
        if options.function in name:
            shown = (f"{kind} to 2^{size}" if size else kind for kind, size in sorted(sizes.items()))
            print(f"{name:<50} {argument:<20} {', '.join(shown)}")
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attackers seen", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--function", metavar="TEXT", default="", help="functions with this in their name (default: all)")
    parser.add_argument("--claim", metavar="ID", action="append", default=[], help="what this claim gives; may be repeated (default: all)")
    parser.add_argument("--jobs", metavar="J", type=int, choices=range(1, 257), default=cores(), help="processes (default: one a core)")
    return parser.parse_args(arguments)
