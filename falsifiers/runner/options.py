"""What the options of `pytest falsifiers` may be, and together with which; each says what was expected."""

import argparse
from collections.abc import Iterable
from pathlib import Path

import pytest

from blackswan import contracts
from blackswan.contracts.model import Claim
from blackswan.contracts.problems import unknown
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.case import load as load_case
from blackswan.falsifiers.runner import validate_case
from blackswan.falsifiers.runner.campaign import Campaign, Selection

LONGEST = 1_000_000.0
"""Seconds: no wait for a process can be longer than 2³¹ milliseconds."""


def seconds(text: str) -> float:
    """The number of --limit. ArgumentTypeError, which argparse shows as it is."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds above 0 and up to {LONGEST:,.0f}")
    return value


def alone(config: pytest.Config) -> None:
    """ValueError where pytest-xdist is to spread the run: its processes would all write the one verdict file."""
    option = config.option
    if hasattr(config, "workerinput") or getattr(option, "tx", None) or getattr(option, "dist", "no") != "no":
        raise ValueError("-n, --dist and --tx: one process writes the verdict file; run without, or claims apart, each with its --verdicts")


def one_case(config: pytest.Config) -> None:
    """ValueError where --replay, which attacks one stored case, is to do something else as well."""
    option = config.option
    if option.resume:
        raise ValueError("--resume goes on with a run, and --replay attacks one stored case; expected only one of them")
    selected = [f"--{name}" for name in ("claim", "operation", "dtype") if getattr(option, name)]
    if selected:
        raise ValueError(
            f"{', '.join(selected)}: --replay attacks the one case of its file, whatever is selected; expected only one of them"
        )


def stored_case(loaded: list[contracts.Contract], path: Path) -> tuple[Claim, Case]:
    """The claim and the case of a replay file. ValueError where no contract has that claim on that operation, or the case is none of it."""
    name, case = load_case(path)
    claims = {claim.id: claim for contract in loaded for claim in contract.claims}
    if name not in claims:
        raise ValueError(f"{path}: is a case of a claim that no contract has: {unknown('claim', name, claims)}")
    if case.operation != (claims[name].operation or ""):
        raise ValueError(f"{path}: is a case of {case.operation}, but {name} is a claim on {claims[name].operation}")
    try:
        validate_case.require(claims[name], case)
    except ValueError as error:
        raise ValueError(f"{path}: not a case of {name}: {error}") from None
    return claims[name], case


def known_names(selection: Selection, loaded: list[contracts.Contract]) -> None:
    """ValueError where a claim or an operation of the selection does not exist, with the nearest name."""
    claims = {claim.id: claim for contract in loaded for claim in contract.claims}
    operations = {claim.operation for claim in claims.values() if claim.operation}
    for name in selection.claims:
        if name not in claims:
            raise ValueError(f"--claim: {unknown('claim', name, claims)}")
    for name in selection.operations:
        if name not in operations:
            raise ValueError(f"--operation: {unknown('operation', name, sorted(operations))}")


def something(campaign: Campaign, replayed: bool) -> None:
    """ValueError where the selection leaves nothing to attack, with what could be."""
    if replayed or any(campaign.targets()):
        return
    chosen = campaign.selection
    claims = [claim for contract in campaign.contracts for claim in contract.claims]
    claims = [claim for claim in claims if not chosen.claims or claim.id in chosen.claims]
    both = [claim for claim in claims if not chosen.operations or claim.operation in chosen.operations]
    if not both:
        operations = _listed(claim.operation or "no operation" for claim in claims)
        raise ValueError(f"--operation {_listed(chosen.operations)}: {_listed(chosen.claims)} is on {operations}; expected one of both")
    names = _listed(chosen.claims or chosen.operations) or "all claims"
    dtypes = _listed(dtype for claim in both for dtype in claim.domain.dtype)
    raise ValueError(f"--dtype {_listed(chosen.dtypes)}: {names} can be attacked in {dtypes} only")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
