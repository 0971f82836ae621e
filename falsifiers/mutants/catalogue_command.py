"""`python -m falsifiers catalogue`: writes contracts/mutants.json from the decorated mutants."""

import argparse
import json
from pathlib import Path

from blackswan import contracts

FILE = Path(contracts.__file__).parent / "mutants.json"


def text() -> str:
    """The catalogue's text, a line a mutant."""
    from blackswan.falsifiers.mutants import catalogue

    lines = (f"  {json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in catalogue().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def run(_options: argparse.Namespace) -> int:
    """Exit status 0."""
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}")
    return 0
