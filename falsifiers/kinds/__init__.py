"""One module a claim kind: what it compares on a case. Kinds that name a check look it up in falsifiers.checks."""

from collections.abc import Callable

from falsifiers.attack import Attack
from falsifiers.case import Case
from falsifiers.comparison import Comparison
from falsifiers.kinds import checked, gradient, parity, rule

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
