"""Small arguments of every elementary operation, for the tests of the reference: drawn as for a claim about it, in float64."""

from dataclasses import replace
from functools import cache
from typing import Any

from falsifiers_claims import CLAIMS

from blackswan.contracts.model import Choice, Range
from blackswan.falsifiers.runner.engine import Options, cases

Arguments = tuple[dict[str, Any], dict[str, Any]]
"""(inputs, scalars); an optional input that is not given is None."""
FLAVOURS = {"normal", "masked", "left_padded", "right_padded"}


@cache
def drawn(operation: str, count: int = 12) -> list[Arguments]:
    """So many cases of an operation, in sizes of 6 at most where its claim has such."""
    found = [claim for claim in CLAIMS.values() if claim.operation == operation and claim.contract != "cuda-kernels"]
    claim = min(found, key=lambda claim: claim.kind != "parity")
    sizes = {name: _small(choice) for name, choice in claim.domain.sizes.items()}
    flavours = tuple(flavour for flavour in claim.domain.flavours if flavour in FLAVOURS)
    small = replace(claim, domain=replace(claim.domain, sizes=sizes, flavours=flavours, boundary=()))
    absent = dict.fromkeys(claim.domain.optional)
    return [
        ({**absent, **case.inputs}, dict(case.scalars))
        for case, _ in zip(cases(small, "float64", Options(examples=count)), range(count), strict=False)
    ]


def _small(choice: Choice) -> Choice:
    if isinstance(choice, Range):
        return Range(choice.min, max(choice.min, min(choice.max, 6)))
    return tuple(value for value in choice if value <= 6) or (min(choice),)
