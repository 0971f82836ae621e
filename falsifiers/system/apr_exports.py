"""Exports of a model in Q8 and Q4 blocks, read by the formulas of the formats."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric import apr_format
from blackswan.falsifiers.numeric.apr_format import CODES, decode
from blackswan.falsifiers.numeric.comparison import Comparison, value_inside
from blackswan.falsifiers.system.adapter_files import TOKENIZER, Model
from blackswan.falsifiers.system.apr_files import EMBEDDING, LONG, ODD, drawn, mixed, new_folder, same_bits
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, reads_files
from blackswan.reference.table import Array

TINY = 1e-30
"""A factor by which numbers in float32 stay far from zero, and are below any usual guard of a division."""


@reads_files
def quantised_export(trial: Trial) -> list[Comparison]:
    """Q8 and Q4 of a file that was written from tensors in several dtypes, read by the formulas: no scale is above that of the largest
    magnitude, and each element has the nearest of the steps of the scale that is stored, within half a step; vectors keep their bits.
    Matrices hold midpoints between steps too, and some nothing but zeros. A scale that float16 does not hold is refused."""
    exact = _with_midpoints(trial, drawn(trial, **({0: LONG, 1: ODD, 2: ODD}.get(trial.seed % 6, {}))))
    found, (_, model) = [], mixed(trial.rng("dtypes"), exact)
    with new_folder() as folder:
        base = model.write_checkpoint(folder / "base")
        shutil.copyfile(CHECKPOINT / TOKENIZER, base / TOKENIZER)
        defaults = map(str, trial.rng("default device").permutation(["cpu", "meta"]))
        for (dtype, code), default in zip((("q8", "AprQ8"), ("q4", "AprQ4")), defaults, strict=True):
            path = folder / f"{dtype}.apr"
            trial.files.export(base, path, dtype, default=default)
            stored = apr_format.read(path)[2]
            for name, value in model.decoder.items():
                if value.ndim == 1:
                    found += same_bits({name: value}, {name: apr_format.array(stored[name])})
                    continue
                found += same(f"dtype of {name}", CODES[code], stored[name].code)
                if found[-1].held:
                    found += _nearest_steps(f"{name} in {dtype}", value, stored[name].content, dtype)
            found += same_bits({name: apr_format.array(each) for name, each in stored.items()}, trial.files.read_checkpoint(path))
        return found + _largest_scales(trial, exact, folder)


def _largest_scales(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """A weight of seven times the largest number of float16 is written in q4; one twice as large is refused by its tensor's name."""
    found = []
    for name, factor in (("largest", 7), ("too large", 14)):
        decoder = {**model.decoder, EMBEDDING: model.decoder[EMBEDDING].copy()}
        decoder[EMBEDDING][-1, -1] = -factor * float(np.finfo(np.float16).max)
        base = replace(model, decoder=decoder).write_checkpoint(folder / name)
        shutil.copyfile(CHECKPOINT / TOKENIZER, base / TOKENIZER)
        ask = partial(trial.files.export, base, folder / f"{name}.apr", "q4")
        if factor == 7:
            ask()
            read = trial.files.read_checkpoint(folder / f"{name}.apr")[EMBEDDING]
            near = abs(float(decoder[EMBEDDING][-1, -1])) * np.array([1 - 1 / 14, 1 + 1 / 14])  # half of a step
            found.append(value_inside("the largest weight in q4, its magnitude", -float(read[-1, -1]), *near))
        else:
            found.append(trial.refuses("a weight too large for q4", ask, EMBEDDING.replace(".", r"\."), "ValueError"))
            found += same("files of a refused export", [], [each.name for each in folder.glob(f"*{name}*.*")])
    return [*found, *_not_finite(trial, model, folder)]


def _not_finite(trial: Trial, model: Model, folder: Path) -> Iterator[Comparison]:
    """A weight that is NaN or infinite, in float32 at the latest, is refused in each dtype by its tensor's name, also in a vector."""
    for number, name in ((np.nan, EMBEDDING), (-np.inf, "model.norm.weight"), (1e39, EMBEDDING)):
        decoder = {**model.decoder, name: model.decoder[name].astype(np.float64)}
        decoder[name].reshape(-1)[-1] = number
        base = replace(model, decoder=decoder).write_checkpoint(folder / f"{number} in {name}")
        shutil.copyfile(CHECKPOINT / TOKENIZER, base / TOKENIZER)
        for dtype in ("float32", "float16", "bfloat16", "q8", "q4"):
            ask = partial(trial.files.export, base, folder / "not finite.apr", dtype)
            yield trial.refuses(f"{number} in {name}, exported in {dtype}", ask, name.replace(".", r"\."), "ValueError")
    yield from same("files of refused exports", [], [each.name for each in folder.glob("*not finite*")])


def _with_midpoints(trial: Trial, model: Model) -> Model:
    """The model with some elements of its matrices next to midway between two steps of their block's unrounded scale, a block of zeros and
    one of a subnormal scale in each, and a matrix of zeros and one of tiny numbers in a layer."""
    rng, decoder = trial.rng("midpoints"), dict(model.decoder)
    for name, value in decoder.items():
        if value.ndim == 2:
            flat = value.reshape(-1).copy()
            blocks = flat[: len(flat) // 32 * 32].reshape(-1, 32)
            steps = (rng.integers(-6, 6, blocks.shape) + rng.uniform(0.498, 0.502, blocks.shape)) / 7
            near = steps * np.abs(blocks).max(axis=1, keepdims=True)
            blocks[:, ::3] = near[:, ::3].astype(np.float32)
            blocks[0], blocks[1:2] = 0.0, blocks[1:2] * 2.0**-16
            decoder[name] = np.zeros_like(value) if name.endswith("up_proj.weight") else flat.reshape(value.shape)
            decoder[name] *= np.float32(TINY if name.endswith("gate_proj.weight") else 1.0)
    return replace(model, decoder=decoder)


def _nearest_steps(name: str, value: Array, content: bytes, dtype: str) -> list[Comparison]:
    """How many scales of a matrix in q8, or of blocks of 32 in q4, are above those by which the largest magnitude has 127 or 7 steps, how
    many elements have another step than the nearest of theirs, and how many are further than half a step. NaN is above, and further."""
    flat = value.astype(np.float64).reshape(-1)
    blocks = flat[None] if dtype == "q8" else np.pad(flat, (0, -len(flat) % 32)).reshape(-1, 32)
    most, stored = (127, np.float32) if dtype == "q8" else (7, np.float16)
    raw = np.frombuffer(content, np.uint8)
    scales = raw[:4].view(np.float32) if dtype == "q8" else np.ascontiguousarray(raw.reshape(-1, 18)[:, :2]).view(np.float16).ravel()
    largest = (np.abs(blocks).max(axis=1).astype(np.float32) / np.float32(most)).astype(stored)
    steps = scales.astype(np.float64)[:, None]
    read = decode("AprQ8" if dtype == "q8" else "AprQ4", content, value.shape)
    codes = np.pad(read.astype(np.float64).reshape(-1), (0, blocks.size - len(flat))).reshape(blocks.shape)
    least = np.abs(blocks - np.clip(np.rint(blocks / np.where(steps > 0, steps, 1)), -most - (dtype == "q4"), most) * steps)
    errors, slack = np.abs(codes - blocks), 2.0**-21 * np.abs(blocks)  # a tie may go either way: the quotient is rounded to float32
    # The largest elements are so many steps away, and the scale is rounded by half of a unit in its last place.
    half = (steps + (most + 1) * np.spacing(scales).astype(np.float64)[:, None]) / 2
    return [
        *same(f"scales of {name}, above that of the largest magnitude", 0, int((~(scales <= largest)).sum())),
        *same(f"{name}, elements that have another step than the nearest", 0, int((~(errors <= least + slack)).sum())),
        *same(f"{name}, elements further than half a step", 0, int((~(errors <= half + slack)).sum())),
    ]
