"""Whether verdicts still speak about the tree: their claims and the code that they ran."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from contracts.model import Domain
from reports.dependencies import Sources
from reports.digests import DigestError, claim_digest
from reports.records import Identity, Run, Verdict, identity

ROOT: Final = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Tree:
    """A checkout: its sources, the digests of its claims by contract and claim, where the code of each claim begins now, by part, and
    what each speaks of."""

    sources: Sources
    claims: Mapping[tuple[str, str], str]
    depends: Mapping[str, Mapping[str, Sequence[str]]] | None = None
    domains: Mapping[tuple[str, str], Domain] = field(default_factory=dict)


def current_tree(root: Path) -> Tree:
    """The checkout at `root`.

    Raises:
        DigestError: a contract does not load, or the tables of operations and checks do not.
    """
    from contracts import ContractError, load

    try:
        claims = [claim for contract in load([root / "contracts"]) for claim in contract.claims]
    except ContractError as error:
        raise DigestError(f"the contracts of this checkout do not load:\n{error}") from error
    by_name = {(claim.contract, claim.id): claim for claim in claims}
    digests = {name: claim_digest(claim) for name, claim in by_name.items()}
    return Tree(Sources(root), digests, _depends(root), {name: claim.domain for name, claim in by_name.items()})


def _depends(root: Path) -> Mapping[str, Mapping[str, Sequence[str]]] | None:
    """What the checkout's tables give now, from a process of its own, for they import torch; None of one without falsifiers."""
    if not (root / "falsifiers" / "dependencies.py").is_file():
        return None
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "falsifiers", "depends"]
    asked = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)  # noqa: S603  # this project's own module
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"]
        raise DigestError(f"what claims of this checkout depend on is not known: python -m falsifiers depends: {said[-1]}")
    found: Mapping[str, Mapping[str, Sequence[str]]] = json.loads(asked.stdout)
    return found


def stale_because(verdict: Verdict, tree: Tree) -> str | None:
    """Why a verdict is stale, or None: its claim, or code that it depends on, is not what it was.

    Another claim of the same contract, or code that the claim's falsifier does not run, may change without making the verdict stale.
    """
    digest = tree.claims.get((verdict["contract"], verdict["claim"]))
    reasons = []
    if digest is None:
        reasons.append("the claim no longer exists")
    elif digest != verdict["digests"]["claim"]:
        reasons.append("the claim has changed")
    reasons += [f"its {part} has changed" for part, entries in verdict["depends"].items() if _changed(verdict, tree, part, entries)]
    return "; ".join(reasons) or None


def _changed(verdict: Verdict, tree: Tree, part: str, entries: Sequence[str]) -> bool:
    now = None if tree.depends is None else tree.depends.get(verdict["claim"])
    if now is not None and list(now[part]) != list(entries):
        return True
    try:
        return tree.sources.digest(part, entries) != verdict["digests"].get(part)
    except DigestError:
        return True


def stale_verdicts(run: Run, tree: Tree) -> dict[Identity, str]:
    """The stale verdicts of a run, with the reason."""
    reasons = ((identity(verdict), stale_because(verdict, tree)) for verdict in run.verdicts)
    return {key: reason for key, reason in reasons if reason is not None}
