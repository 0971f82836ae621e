"""`python -m falsifiers depends`: the files and functions that each claim's verdict depends on, as JSON."""

import argparse
import json
from typing import Any

import contracts
from falsifiers.dependencies import entries


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser("depends", help="the files, whose imports count too, that the verdict of each claim depends on, as JSON")
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Exit status 0."""
    found = {claim.id: entries(claim) for contract in contracts.load() for claim in contract.claims}
    print(json.dumps(found, indent=1))
    return 0
