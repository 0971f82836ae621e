"""What the commands share: how they end, and how an adapter is opened."""

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blackswan.impl.folder import is_there

if TYPE_CHECKING:
    import torch

    from blackswan.impl.config import ClassifyConfig
    from blackswan.impl.memory import Estimate
    from blackswan.impl.pipeline import ClassifyPipeline

DEVICE_HELP = "cpu, auto, or an accelerator by its torch name: cuda[:N], xpu, mps, hip (default: cpu); only auto falls back to the CPU"


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
    """`--adapter`, `--model` and `--device`; where no adapter is required, `--model` alone can say all."""
    parser.add_argument("--adapter", metavar="DIR", type=Path, required=required, help="adapter folder, e.g. RUN/best (PEFT's format)")
    alone = "" if required else "; alone, a merged model"
    parser.add_argument("--model", metavar="PATH", type=Path, help=f"base (folder or .apr), where it is not what the adapter names{alone}")
    parser.add_argument("--device", default="cpu", metavar="NAME", help=DEVICE_HELP)


def open_saved(options: argparse.Namespace) -> "ClassifyPipeline":
    """The pipeline of `--adapter`, or of the merged model that either option names.

    A run's own folder is understood as its best adapter, or its last where there is no best one.
    """
    from blackswan.impl.pipeline import ClassifyPipeline
    from blackswan.impl.saved import is_merged

    folder: Path | None = options.adapter
    if folder is None:
        if options.model is None:
            raise BadInput("expected --adapter DIR, or --model DIR with a merged model")
        if not is_merged(options.model):
            raise BadInput(f"--model: {options.model} is an adapter; expected --adapter {options.model}")
        return ClassifyPipeline.from_merged(options.model, device=options.device)
    for part in ("best", "last"):
        if (options.adapter / "run.json").is_file() and (options.adapter / part).is_dir():
            folder = options.adapter / part
            break
    return ClassifyPipeline.from_saved(folder, options.model, device=options.device)


def parameter_count(model: Path) -> int:
    """Parameters of the decoder in a checkpoint folder, tied embeddings counted once. Raises what `read_config` raises."""
    from blackswan.impl.checkpoint import read_config
    from blackswan.impl.decoder import parameter_shapes

    return sum(math.prod(shape) for shape in parameter_shapes(read_config(model)).values())


def memory_of_a_step(model: Path, config: "ClassifyConfig", samples: int, longest: int, device: "torch.device | str") -> "Estimate":
    """What an optimiser step needs on the device, in its largest batch: of so many samples in all, the longest of so many tokens."""
    import torch

    from blackswan.impl.checkpoint import read_config
    from blackswan.impl.classifier import Adaptation
    from blackswan.impl.fused.memory import estimate_fused
    from blackswan.impl.fused.step import backend_of
    from blackswan.impl.memory import estimate

    batch = min(config.batch_size, samples)
    passes = min(config.accumulation_steps, math.ceil(samples / batch))
    architecture, on = read_config(model), torch.device(device)
    given = (architecture, Adaptation.of(config), batch, longest, getattr(torch, config.dtype))
    if backend_of(config, architecture, on)[0]:
        card = on if on.type == "cuda" else "cuda"  # under the interpreter it is told what a card would need
        return estimate_fused(*given, accumulation=passes, multi_label=config.multi_label, device=card)
    return estimate(*given, accumulation=passes, multi_label=config.multi_label, device=on)


def require_absent(folder: Path) -> None:
    """Raises a BadInput where something of that name exists, or where no folder of that name can be made."""
    if is_there(folder):
        raise BadInput(f"--output: {folder} exists; choose another name or move it away")
    require_place(folder)


def require_place(folder: Path) -> None:
    """Raises a BadInput where a folder of that name cannot be made or written into."""
    if is_there(folder) and not folder.exists():
        raise BadInput(f"--output: {folder} is a link to what is not there; choose another name or move it away")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise BadInput(f"--output: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadInput(f"--output: no permission to write into {there}")
