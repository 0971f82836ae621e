"""Changes drawn at random: a wrong one is found by the claim that executes it, an equal one survives, and the function is as before."""

from pathlib import Path

from benchmarks.attackers import chance, changes
from blackswan import contracts
from blackswan.falsifiers.runner.campaign import Selection, targets
from blackswan.impl.operations import optimisation


def test_a_claim_is_asked_of_the_lines_that_it_executes(tmp_path: Path) -> None:
    module = "blackswan.impl.operations.optimisation"
    own = {change.what: change for change in changes.every() if change.name.startswith(f"{module}:")}
    wrong, equal = own["another operator: max_norm / norm"], own["another comparison: max_norm > 0"]
    elsewhere = next(change for change in own.values() if ":learning_rate_schedule#" in change.name)
    (target,) = targets(contracts.load(), Selection(claims=["OPT-CLIP"], dtypes=["float32"]), "cpu")
    before = optimisation.clip_by_global_norm.__code__
    made = chance.trace(target, tmp_path)
    assert chance.trace(target, tmp_path) == made  # as it is kept
    found = chance.attack([wrong, equal, elsewhere], [(1.0, target, frozenset(made["lines"]))])
    assert [(one["outcome"], one["asked"]) for one in found] == [(chance.KILLED, 1), (chance.SURVIVED, 1), (chance.UNSEEN, 0)]
    assert found[0]["by"] == "OPT-CLIP float32"
    assert optimisation.clip_by_global_norm.__code__ is before


def test_every_change_can_be_planted() -> None:
    for change in list(changes.every())[::60]:
        with changes.applied(change.name):
            pass
