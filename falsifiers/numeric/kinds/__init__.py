"""One module a claim kind: what it compares on a case. Kinds that name a check look it up in falsifiers.checks."""

from collections.abc import Callable

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.kinds import checked, gradient, parity, rule

Compare = Callable[[Attack, Case], list[Comparison]]

KINDS: dict[str, Compare] = {
    "parity": parity.compare_outputs,
    "trajectory": parity.compare_outputs,
    "gradient": gradient.compare_gradients,
    "rule": rule.check_rule,
    **dict.fromkeys(
        ("invariant", "metamorphic", "roundtrip", "rejection", "determinism", "bound", "resource", "device"), checked.run_check
    ),
}
