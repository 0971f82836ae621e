"""`python -m falsifiers catalogue`: writes contracts/mutants.json from the decorated mutants."""

import argparse
import json
from pathlib import Path
from typing import Any

from blackswan import contracts

FILE = Path(contracts.__file__).parent / "mutants.json"


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "catalogue", help="write contracts/mutants.json, by which contracts are linted, from the mutants' decorators"
    )
    parser.set_defaults(run=_run)


def text() -> str:
    """The catalogue's text, a line a mutant."""
    from blackswan.falsifiers.mutants import catalogue

    lines = (f"  {json.dumps(name)}: {json.dumps(entry, ensure_ascii=False)}" for name, entry in catalogue().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _run(options: argparse.Namespace) -> int:
    del options
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE}")
    return 0
