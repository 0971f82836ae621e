"""`python -m benchmarks.attackers places`: writes where claims fail on the changes of all rounds, by which suspects are ranked."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blackswan import contracts
from blackswan.falsifiers.diagnosis.run_failures import PLANTED

FOLDER, CHECKOUT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]


def main() -> int:
    """Writes `planted.json` anew: of each claim on runs, files, data or devices and each change that it is false on, function and place."""
    systems = {claim.id for contract in contracts.load() for claim in contract.claims if claim.system}
    found = dict[str, dict[str, list[str]]]()
    for file in sorted(FOLDER.glob("round-*/results*.json"), key=lambda file: (_round(file.parent.name), file.name)):
        for name, said in _said(json.loads(file.read_text(encoding="utf-8"))["patches"]):
            claim, _, _ = said["claims"][0].partition(" ")
            if claim in systems:
                at = said.get("place") or said["culprit"].partition(" at ")[2]
                found.setdefault(claim, {})[f"{file.parent.name}/{Path(name).stem}"] = [_function(said["where"]), at]
    _write(PLANTED, dict(sorted(found.items())))
    print(f"{PLANTED.resolve().relative_to(CHECKOUT)}: {sum(map(len, found.values()))} changes, {len(found)} claims")
    return 0


def forget(checkout: Path, patch: Path | None) -> None:
    """Takes out of a checkout's `planted.json` what is known of the patch's round and of later ones: who asked it first did not know."""
    file = checkout / PLANTED.resolve().relative_to(CHECKOUT)
    if patch is None or not (number := _round(patch.parent.name)) or not file.is_file():
        return
    known = json.loads(file.read_text(encoding="utf-8"))
    _write(file, {claim: {name: said for name, said in each.items() if _round(name) < number} for claim, each in known.items()})


def _said(patches: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The changes that were found, and what a claim said of each where it says a place."""
    for name, said in patches.items():
        if said.get("claims") and (said.get("place") or " at " in said.get("culprit", "")):
            yield name, said


def _function(where: str) -> str:
    """`impl.fit:_Run._after` for `impl/fit.py:_Run._after`."""
    file, _, name = where.partition(":")
    return f"{file.removesuffix('.py').replace('/', '.')}:{name}"


def _round(name: str) -> int:
    """The number of `round-60` or `round-60/32-strata-by-numpy`; 0 of another name."""
    found = re.match(r"round-(\d+)", name)
    return int(found[1]) if found else 0


def _write(file: Path, known: dict[str, dict[str, list[str]]]) -> None:
    file.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
