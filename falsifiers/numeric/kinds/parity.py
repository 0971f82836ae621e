"""Parity and trajectory: the subject's outputs equal the reference's within the claim's tolerance."""

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison


def compare_outputs(attack: Attack, case: Case) -> list[Comparison]:
    """Every output of the operation, by name."""
    expected = attack.expect(case)
    actual = attack.answer(case)
    return attack.judge(
        expected,
        actual,
        lambda: attack.floor(case, lambda inputs, table: reference.evaluate(case.operation, inputs, case.scalars, table), expected),
        attack.dtypes(expected),
        attack.reach(case),
    )
