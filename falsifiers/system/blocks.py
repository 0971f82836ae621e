"""Blocks inside which something holds for a program: one within another, left by an error, and entered again."""

import tempfile
from collections.abc import Generator as Generating
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial

if TYPE_CHECKING:
    from blackswan.falsifiers.subjects.impl.blocks import Block

NUMBERS, TURNS, DEEPEST = 3, 12, 4
ADDING = ("replaced", "scope")
"""Kinds of block that add to what holds around them; of the others the innermost one holds alone."""
OVERLAPPING = ("scope", "unchecked", "exact")
"""Kinds of block that steps of a trainer are in, of which two may make steps in two threads."""
WITHOUT_EFFECT = {("backend", 2)}
"""What a program finds without any block: the backend `auto`."""


def innermost_holds(trial: Trial) -> Iterator[Comparison]:
    """Blocks of each kind are entered and left at random, by an error and without: what a program sees there is what the innermost one
    says, or adds to the others, as it did by itself, and a thread that begins there sees it too, and so does the one of two whose other has
    ended though it began first; and outside of all it is what it was
    before. So is torch's compiler, which another function stands for while a library is imported, where that succeeds and where not, and
    where two threads import it, and what the program logs; and so is the backend, which an estimate chooses for itself."""
    kept = dict.fromkeys(("there", "missing", "two threads"), True)
    yield from same("torch's compiler and what is logged after an import", kept, trial.devices.settings_after_imports())
    for chosen, (before, *after) in trial.devices.backends_after_estimates().items():
        yield from same(f"what computes by {chosen} after estimates", [before, before], after)
    for kind in trial.devices.block_kinds:
        with tempfile.TemporaryDirectory() as folder:
            block, rng = trial.devices.block(kind, Path(folder)), trial.rng(kind)
            try:
                yield from _of_a_kind(kind, block, rng)
            finally:
                block.put_back()


def _of_a_kind(kind: str, block: "Block", rng: Generator) -> Iterator[Comparison]:
    """What is seen by itself, in another thread, when two overlap, and on a random walk into blocks and out of them."""
    none = block.seen()
    alone = {number: _entered(block, number, bool(rng.integers(2))) for number in range(NUMBERS)}
    yield from same(f"{kind}: in a thread that begins in a block", alone[1], _entered(block, 1, False, beside=True))
    if kind in OVERLAPPING:
        yield from same(f"{kind}: when the first of two has ended, and both", [alone[1], none], _overlapping(block))
    without = [number for number, seen in alone.items() if seen == none and (kind, number) not in WITHOUT_EFFECT]
    yield from same(f"{kind}: blocks without effect", [], without)
    with closing(_walk(block, rng)) as walk:
        for stack, seen in walk:
            yield from same(f"{kind} inside blocks {stack}", _expected(kind, stack, none, alone), seen)


def _entered(block: "Block", number: int, failing: bool, beside: bool = False) -> dict[str, Any]:
    block.enter(number)
    seen = block.seen_beside() if beside else block.seen()
    block.leave(failing)
    return seen


def _overlapping(block: "Block") -> list[dict[str, Any]]:
    block.enter(0)
    block.enter(1)
    block.leave_the_first()
    within = block.seen()
    block.leave(False)
    return [within, block.seen()]


def _walk(block: "Block", rng: Generator) -> Generating[tuple[list[int], dict[str, Any]], None, None]:
    """Gives the numbers of the blocks around, from the outermost on, and what is seen there. Whenever it ends, all blocks are left."""
    stack: list[int] = []
    try:
        for turn in range(2 * TURNS):
            if stack and (turn >= TURNS or len(stack) == DEEPEST or rng.random() < 0.4):
                stack.pop()
                block.leave(bool(rng.integers(2)))
            elif turn < TURNS:
                number = int(rng.integers(NUMBERS))
                block.enter(number)
                stack.append(number)
            yield [*stack], block.seen()
    finally:
        while stack:
            stack.pop()
            block.leave(False)


def _expected(kind: str, stack: list[int], none: dict[str, Any], alone: dict[int, dict[str, Any]]) -> dict[str, Any]:
    if kind == "scope":
        return {"prefix": "".join(f"{number}." for number in stack)}
    if kind not in ADDING:
        return alone[stack[-1]] if stack else none
    expected = dict(none)
    for number in stack:
        expected |= {name: value for name, value in alone[number].items() if value != none[name]}
    return expected
