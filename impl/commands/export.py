"""Writes a checkpoint as an .apr file, with its tokenizer beside it, or an .apr file as a Hugging Face checkpoint folder."""

import argparse
from pathlib import Path

from blackswan.impl.commands.common import BadInput, require_absent

PLAIN, QUANTISED = ("float32", "float16", "bfloat16"), ("q8", "q4")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--model", metavar="PATH", type=Path, required=True, help="checkpoint folder or .apr file")
    parser.add_argument(
        "--output", metavar="PATH", type=Path, required=True, help="what to write: a file if its name ends with .apr, else a folder"
    )
    parser.add_argument(
        "--dtype",
        choices=(*PLAIN, *QUANTISED),
        help="of the tensors (default: each keeps its own); q8 and q4 quantise the matrices, in .apr files only",
    )


def run(options: argparse.Namespace) -> None:
    """Writes the file or the folder."""
    import torch

    from blackswan.impl.adapter import HEAD
    from blackswan.impl.apr import is_apr
    from blackswan.impl.apr_write import export_apr
    from blackswan.impl.checkpoint import TOKENIZER, belonging, load_checkpoint, said_beside, save_checkpoint
    from blackswan.impl.tensors import Converted

    require_absent(options.output)
    if options.dtype in QUANTISED and not is_apr(options.output):
        raise BadInput(f"--dtype: {options.dtype} is for .apr files; expected one of {', '.join(PLAIN)} for a folder")
    if (options.model / HEAD).is_file():
        raise BadInput(f"--model: {options.model} is a merged model, whose head ({HEAD}) has no place in a checkpoint; move {HEAD} away")
    checkpoint = load_checkpoint(options.model)
    if is_apr(options.output):
        export_apr(checkpoint, options.model, options.output, options.dtype)
    else:
        tensors = checkpoint.tensors
        if options.dtype:
            tensors = Converted(tensors, dtype=getattr(torch, options.dtype), device="cpu")
        tokenizer = belonging(options.model, TOKENIZER)
        save_checkpoint(options.output, checkpoint.config, tensors, tokenizer, said_beside(options.model))
    print(f"{options.output} holds the model")
