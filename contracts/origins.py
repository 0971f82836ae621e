"""The claims of the system that this project is modelled on, and the claims here that took each of them up, or why it is refused."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blackswan.contracts.model import Contract
from blackswan.contracts.problems import Problem, unknown
from blackswan.contracts.vocabulary import ORIGINS, read_vocabulary


@dataclass(frozen=True)
class Origin:
    """A claim of that system in our own words, the ids of the claims here that name it, and the reason where it is refused."""

    id: str
    statement: str
    refused: str | None
    claims: tuple[str, ...]


def origins(contracts: Iterable[Contract], path: Path = ORIGINS) -> tuple[list[Origin], list[Problem]]:
    """Every origin in the file's order; and each that has neither a claim nor a refusal, or both, and a claim's origin that is not listed.

    ContractError where the file is wrong.
    """
    document = read_vocabulary(path, "origins")
    listed = document.data["origins"]
    claims = [claim for contract in contracts for claim in contract.claims]
    found = [
        Origin(name, raw["statement"], raw.get("refused"), tuple(claim.id for claim in claims if name in claim.origin))
        for name, raw in listed.items()
    ]
    problems = [
        Problem(*claim.location, claim.id, unknown("origin", name, listed))
        for claim in claims
        for name in claim.origin
        if name not in listed
    ]
    for origin in found:
        if bool(origin.claims) == bool(origin.refused):
            said = f"is refused, and {', '.join(origin.claims)} took it up" if origin.claims else "has neither a claim nor `refused`"
            problems.append(document.problem(("origins", origin.id), said))
    return found, problems
