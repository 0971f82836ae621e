"""What the commands share: how they end, and how an adapter is opened."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from impl.pipeline import ClassifyPipeline

DEVICE_HELP = "cpu, cuda, cuda:N or auto (default: cpu); only auto falls back to the CPU"


class BadInput(ValueError):  # noqa: N818  what the user did, not a defect of the program
    """Something that was given cannot be used; nothing was written."""


class Interrupted(Exception):  # noqa: N818  what the user wished
    """Ctrl-C; the message says how to go on."""


class TrainingFailed(RuntimeError):  # noqa: N818  a state of the run
    """Training began and could not go on."""


@dataclass(frozen=True)
class Command:
    """A command's two descriptions, its options, and what it does."""

    help: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


def add_adapter_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """`--adapter`, `--model` and `--device`."""
    parser.add_argument("--adapter", metavar="DIR", type=Path, required=required, help="adapter folder, e.g. RUN/best (PEFT's format)")
    parser.add_argument("--model", metavar="DIR", type=Path, help="base checkpoint, where it is not what the adapter names")
    parser.add_argument("--device", default="cpu", metavar="NAME", help=DEVICE_HELP)


def open_adapter(options: argparse.Namespace) -> "ClassifyPipeline":
    """The pipeline of an adapter. A run's own folder is understood as its best adapter, or its last where there is no best one."""
    from impl.pipeline import ClassifyPipeline

    folder: Path = options.adapter
    for part in ("best", "last"):
        if (options.adapter / "run.json").is_file() and (options.adapter / part).is_dir():
            folder = options.adapter / part
            break
    return ClassifyPipeline.from_adapter(folder, options.model, device=options.device)


def parameter_count(model: Path) -> int:
    """Parameters of the decoder in a checkpoint folder, tied embeddings counted once. Raises what `read_config` raises."""
    from impl.checkpoint import read_config
    from impl.decoder import parameter_shapes

    return sum(math.prod(shape) for shape in parameter_shapes(read_config(model)).values())


def require_absent(folder: Path) -> None:
    """Raises a BadInput where something of that name exists, or where its parent is no folder."""
    if folder.exists() or folder.is_symlink():
        raise BadInput(f"--output: {folder} exists; choose another name or move it away")
