"""Trainers on a card that is not the current one, of a host whose cards are feigned."""

from dataclasses import replace

from blackswan.falsifiers.numeric.comparison import Comparison, value_at_most
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import drawn, small

NUMBERS = (64, 128)
"""Indices of cards that no host has, and torch can count."""
DONE = {"captures", "events", "handles", "launches", "memory", "products", "streams that wait", "streams waited for"}


def cards_are_kept_apart(trial: Trial) -> list[Comparison]:
    """All that steps do is for the card of their tensors, their graphs share a pool and hold as little of it for many tokens as for
    few, and nothing that these read goes before they do. No capture ends by what another thread does meanwhile.
    Streams wait for what they read or write over of each other's work.

    In bfloat16, whose products are tuned, and NF4; on batches of several lengths, the longest at first or not.
    """
    rng = trial.rng("cards")
    work = replace(small(rng, trial.seed, nf4=True), backend="fused", dtype="bfloat16", targets="all", layers=1, micro=2, seq=12)
    used, current, third = rng.permutation(range(*NUMBERS))[:3].tolist()
    lengths = rng.permutation([12, 3]).tolist()
    found = trial.devices.on_cards(work, drawn(rng, work), lengths, (used, current, third))
    elsewhere = {what: [each for each in found.elsewhere if each.startswith(what)] for what in sorted(found.done)}
    gone = found.gone or ("memory",)
    return [
        *(each for what, others in elsewhere.items() for each in same(f"{what}, for another card", [], others)),
        *same("what is not done for any card", [], sorted(DONE - found.done)),
        *same("pools of graphs", 1, found.pools),
        value_at_most("sizes of what graphs hold, beside one of steps and one of gradients", max(0, found.sizes - 2), 0),
        *same("captures that calls of any thread end", False, "global" in found.modes),
        *same("what does not wait for another stream", (), found.races),
        *(each for name in gone for each in same(f"{name}: read after it was freed", (), found.gone)),
    ]
