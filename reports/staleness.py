"""Staleness of kept verdicts. They are current while the folders that a verdict depends on are what they were."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from blackswan.contracts.model import Domain
from blackswan.reports.digests import FOLDERS, DigestError, tree_digests
from blackswan.reports.records import Identity, Run, identity

ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Tree:
    """A checkout: the digests of its folders, what each of its claims speaks of, by contract and claim, and which are asked on request."""

    digests: Mapping[str, str]
    domains: Mapping[tuple[str, str], Domain] = field(default_factory=dict)
    on_request: Collection[tuple[str, str]] = ()


def current_tree(root: Path) -> Tree:
    """The checkout at `root`.

    Raises:
        DigestError: a contract does not load, or a file cannot be read.
    """
    from blackswan.contracts import ContractError, load

    try:
        claims = [(contract, claim) for contract in load([root / "contracts"]) for claim in contract.claims]
    except ContractError as error:
        raise DigestError(f"the contracts of this checkout do not load:\n{error}") from error
    requested = {(claim.contract, claim.id) for contract, claim in claims if contract.on_request}
    return Tree(tree_digests(root), {(claim.contract, claim.id): claim.domain for _, claim in claims}, requested)


def stale_verdicts(run: Run, tree: Tree) -> dict[Identity, str]:
    """The stale verdicts of a run, with the reason: a folder has changed, or the claim is no more."""
    changed = [folder for folder in FOLDERS if run.header["digests"].get(folder) not in (None, tree.digests[folder])]
    reason = f"{', '.join(changed)} changed" if changed else None
    found = {}
    for verdict in run.verdicts:
        gone = (verdict["contract"], verdict["claim"]) not in tree.domains
        if gone or reason:
            found[identity(verdict)] = "the claim no longer exists" if gone else str(reason)
    return found
