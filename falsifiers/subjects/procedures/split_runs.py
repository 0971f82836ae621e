"""Runs from a corpus and a checkpoint on disk, through the pipeline and through the command, and the samples that each fetches."""

import argparse
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch

from blackswan.falsifiers.subjects.impl.corpora import Corpora
from blackswan.impl import dispatch
from blackswan.impl.commands import train
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.corpus import load_corpus
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]


def run_on_corpus(scalars: Scalars, device: torch.device) -> dict[str, Array]:
    """A run on the checkpoint `model` and the corpus `corpus`, with `validation` where that is named, by `entry`: pipeline or command.

    `text` [fetched] is every sample that a pass read, its tokens and its label as text, in their order; `trained` whether the pass trained.
    `held_out` are the places in a corpus of those `labels` that the split gives for validation, asked for alone.
    """
    with _fetched() as fetched, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ENTRIES[scalars["entry"]](scalars, device)
    settings = scalars["settings"]
    split = Corpora(device, None).split(scalars["labels"], settings["num_classes"], settings["validation_fraction"], settings["seed"])
    return {
        "text": np.asarray([text for text, _ in fetched], str),
        "trained": np.asarray([trained for _, trained in fetched], bool),
        "held_out": np.asarray(split.validation),
    }


def _by_pipeline(scalars: Scalars, device: torch.device) -> None:
    config = ClassifyConfig.from_mapping(scalars["settings"])
    pipeline = ClassifyPipeline.from_pretrained(Path(scalars["model"]), config, device=device)
    given, validation = (
        load_corpus(Path(scalars[name]), config.num_classes, config.multi_label) if name in scalars else None
        for name in ("corpus", "validation")
    )
    assert given is not None
    pipeline.fit(given, validation, Path(scalars["output"]))


def _by_command(scalars: Scalars, device: torch.device) -> None:
    parser = argparse.ArgumentParser()
    train.add_options(parser)
    settings = Path(scalars["output"]).with_suffix(".yaml")
    settings.write_text(json.dumps(scalars["settings"]))
    places = {name: scalars[name] for name in ("model", "corpus", "output", "validation") if name in scalars}
    options = {**places, "config": settings, "device": device}
    train.run(parser.parse_args([f"--{name}={value}" for name, value in options.items()]))


ENTRIES: dict[str, Callable[[Scalars, torch.device], None]] = {"pipeline": _by_pipeline, "command": _by_command}


@contextmanager
def _fetched() -> Iterator[list[tuple[str, bool]]]:
    """Of every pass in the block each sample, and whether it was one of a micro-batch."""
    found: list[tuple[str, bool]] = []
    rows: list[list[int]] = []

    def around(path: str, operation: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        nonlocal rows
        if operation == "embedding":
            rows = arguments["input_ids"].tolist()
        elif operation == "pool":
            mask = arguments["mask"].tolist()
            rows = [[token for token, real in zip(*pair, strict=True) if real] for pair in zip(rows, mask, strict=True)]
        elif operation == "weighted_cross_entropy":
            labels = arguments["labels"].tolist()
            found.extend((json.dumps([row, label]), "micro." in path) for row, label in zip(rows, labels, strict=True))
        return function(**arguments)

    with dispatch.wrapping(around):
        yield found
