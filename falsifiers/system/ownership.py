"""Who owns tensors that are handed over: the one who keeps them, and nobody else writes to them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import drawn, small


def handed_tensors_stay(trial: Trial) -> Iterator[Comparison]:
    """Objects made of the same tensors work one after the other, and once more when those were written over, as one by itself does.

    So do models on a batch that is written over the one before it, and random weights are the same whenever they are read.
    Before they are written over, the tensors are as they were. What is trained moves, in whatever order it lies. What a recording of steps
    says of their calls is what those calls were given and gave, although the steps went on to write to parameters and moments.
    """
    rng = trial.rng("work")
    work = replace(small(rng, trial.seed, nf4=bool(rng.integers(2))), vocab=260, targets=str(rng.choice(["q_v", "all"])))
    weights = drawn(rng, work)
    works = {}
    for kind in trial.ownership.kinds:
        hand, other = (trial.ownership.hand(kind, work, weights) for _ in range(2))
        handed = hand.content()
        objects = [hand.open() for _ in range(3)]
        before = {**hand.content(), **handed}  # what objects give out is somebody's too
        alone = works[kind] = other.work(other.open())
        trained = {name: value for name, value in handed.items() if f"trainable/{name}" in alone}
        stayed = [name for name, value in trained.items() if np.array_equal(value, alone[f"trainable/{name}"])]
        yield from same(f"{kind}: trained tensors that stay where they were", [], stayed)
        yield from same(f"{kind}: the first of two", alone, hand.work(objects[0]))
        yield from same(f"{kind}: the second of two", alone, hand.work(objects[1]))
        yield from same(f"{kind}: what was handed over", before, hand.content())
        hand.overwrite()
        yield from same(f"{kind}: once that was written over", alone, hand.work(objects[2]))
    for one, like in (("a pipeline", "a copy of a pipeline"), ("a classifier in NF4", "a classifier in NF4 of a state dict")):
        yield from same(f"{like} beside {one}", works[one], works[like])
    listed = trial.ownership.listed(work)
    yield from same("names of tensors after the lists were emptied", listed[: len(listed) // 2], listed[len(listed) // 2 :])
    yield from same("answers on a batch in the memory of one before it", *trial.ownership.refilled(work, weights))
    in_order, *others = trial.ownership.read_again(work)
    yield from (each for found in others for each in same("random weights that are read in another order", in_order, found))
    then, now = trial.ownership.recorded(work, weights)
    yield from same("calls that are recorded", [name for name, *_ in then], [name for name, *_ in now])
    for (name, *at_the_call), (_, *said) in zip(then, now, strict=False):
        yield from same(f"recorded call {name}", *({"inputs": given, "outputs": results} for given, results in (at_the_call, said)))
