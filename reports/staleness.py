"""Whether verdicts still speak about the tree: their claims and the code that they ran."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from reports.digests import DigestError, tree_digests
from reports.records import Header, Identity, Run, Verdict, identity

ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Tree:
    """The digests of a checkout: by folder, and by contract and claim."""

    folders: Mapping[str, str]
    claims: Mapping[tuple[str, str], str]


def current_tree(root: Path) -> Tree:
    """The digests of the checkout at `root`.

    Raises:
        DigestError: a folder is missing, a file cannot be parsed or a contract does not load.
    """
    from contracts import ContractError, contract_digest, load

    try:
        claims = [claim for contract in load([root / "contracts"]) for claim in contract.claims]
    except ContractError as error:
        raise DigestError(f"the contracts of this checkout do not load:\n{error}") from error
    return Tree(tree_digests(root), {(claim.contract, claim.id): contract_digest(claim) for claim in claims})


def changed_folders(header: Header, tree: Tree) -> list[str]:
    """The folders that the run depended on and that are not as they were."""
    return [folder for folder, digest in header["digests"].items() if digest is not None and digest != tree.folders.get(folder)]


def stale_because(header: Header, verdict: Verdict, tree: Tree) -> str | None:
    """Why a verdict is stale, or None.

    Another claim of the same contract may change without making this one stale, so the contracts folder does not count here; the
    code folders do, as a whole.
    """
    digest = tree.claims.get((verdict["contract"], verdict["claim"]))
    reasons = []
    if digest is None:
        reasons.append("the claim no longer exists")
    elif digest != verdict["digests"]["claim"]:
        reasons.append("the claim has changed")
    code = [folder for folder in changed_folders(header, tree) if folder != "contracts"]
    if code:
        reasons.append(f"{', '.join(code)} {'has' if len(code) == 1 else 'have'} changed")
    return "; ".join(reasons) or None


def stale_verdicts(run: Run, tree: Tree) -> dict[Identity, str]:
    """The stale verdicts of a run, with the reason."""
    reasons = ((identity(verdict), stale_because(run.header, verdict, tree)) for verdict in run.verdicts)
    return {key: reason for key, reason in reasons if reason is not None}
