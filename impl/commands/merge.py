"""Writes a plain Hugging Face checkpoint with the adapter's updates merged into the weights, and the head beside it."""

import argparse
from pathlib import Path

from blackswan.impl.commands.common import add_adapter_options, open_saved, require_absent


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_adapter_options(parser)
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="folder to write; it must not exist")


def run(options: argparse.Namespace) -> None:
    """Writes the folder."""
    require_absent(options.output)
    open_saved(options).merge(options.output)
    print(f"{options.output} holds the merged model and its head")
