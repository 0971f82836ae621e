"""`python -m falsifiers catalogue`: writes the names that contracts may use and that code declares, mutants and checks of systems."""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blackswan import contracts
from blackswan.contracts.vocabulary import own_folder
from blackswan.reports import places

FOLDER = Path(contracts.__file__).parent


def files() -> dict[Path, str]:
    """The text of each catalogue, a line an entry."""
    from blackswan.falsifiers.mutants import catalogue, own_mutants
    from blackswan.falsifiers.system.catalogue import checks

    if own := own_folder():
        return {own / "mutants.json": _text({name: entry for name, entry in catalogue().items() if name in own_mutants()})}
    return {FOLDER / "mutants.json": _text(catalogue()), FOLDER / "system_checks.json": _text(checks())}


def _text(entries: Mapping[str, Any]) -> str:
    lines = (f"  {json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in entries.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def run(_options: argparse.Namespace) -> int:
    """Exit status 0; 1 where a mutant names a step that the program does not have, and nothing is written."""
    from blackswan.falsifiers.mutants.registry import absent_steps

    if absent := absent_steps():
        for name, step in absent.items():
            print(f"mutant {name}: {step} is not there; expected a function, class, method or constant of that name", file=sys.stderr)
        return 1
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {places.shown(path)}")
    return 0
