"""What a user is told before a run: the settings that hold where none is given, one that is refused, and the numbers of the summary."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_at_most
from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import BYTES, scale_bytes, split
from blackswan.reference.classifier import parameter_shapes, projections

QLORA: dict[str, Any] = {
    **{"num_classes": 2, "lora_rank": 16, "lora_alpha": 32.0, "lora_targets": "q_v", "learning_rate": 2e-4, "epochs": 3},
    **{
        "max_seq_len": 256,
        "batch_size": 16,
        "accumulation_steps": 1,
        "gradient_clip_norm": 1.0,
        "quantize_nf4": True,
        "double_quantize": False,
    },
    **{"warmup_fraction": 0.06, "weight_decay": 0.01, "schedule": "linear", "pooling": "mean", "class_weights": None, "multi_label": False},
    **{"validation_fraction": 0.1, "early_stop_patience": None, "log_interval": 100, "seed": 0, "padding_side": "right"},
    **{"dtype": "float32", "backend": "auto"},
}
"""For models of 13B parameters at most; larger ones have half the learning rate."""
BY_PYTHON = QLORA | {"num_classes": 5, "max_seq_len": 512, "quantize_nf4": False}
"""Where a program gives none, and of adapters beside which there are none."""
LIMIT = 13 * 10**9
MIB = 2**20
PRINTED = 0.005 + 1e-9
"""Half a unit of the last digit that the table of memory shows, in MiB."""


def qlora_defaults_are_published(trial: Trial) -> Iterator[Comparison]:
    """Every setting of models from a million to 70 billion parameters has its value; alpha is twice a rank that is given alone, and what is
    given with one, be it the usual one too.

    Python's own settings, without a model's size, have theirs.
    """
    rng = trial.rng("defaults")
    ranks = int(rng.integers(1, 65)), int(rng.integers(65, 2**20))
    yield from same("by Python", BY_PYTHON, trial.classifiers.settings({}))
    for size in (10**6, 494_032_768, LIMIT - 1, LIMIT, LIMIT + 1, 70 * 10**9):
        expected = {**QLORA, "learning_rate": 2e-4 if size <= LIMIT else 1e-4}
        yield from same(f"{size:,} parameters", expected, trial.classifiers.defaults(size, {}))
        for rank in ranks:
            ranked = {**expected, "lora_rank": rank, "lora_alpha": 2.0 * rank}
            yield from same(f"{size:,} parameters, rank {rank}", ranked, trial.classifiers.defaults(size, {"lora_rank": rank}))
            both = {"lora_rank": rank, "lora_alpha": QLORA["lora_alpha"]}
            yield from same(f"{size:,} parameters, {both}", expected | both, trial.classifiers.defaults(size, both))


def full_fine_tuning_is_refused(trial: Trial) -> list[Comparison]:
    """All parameters as what is trained are refused with the reason, by the commands' settings and by the pipeline's."""
    full, reason = {"lora_targets": "full"}, "lora_targets is 'full'.*base weights are not trained"
    entries: dict[str, Callable[[], object]] = {
        "command": partial(trial.classifiers.defaults, 10**6, full),
        "pipeline": partial(trial.classifiers.fresh, CHECKPOINT, full, ["date"]),
    }
    return [trial.refuses(f"by the {name}", ask, reason, "ValueError") for name, ask in entries.items()]


def summary_is_right(trial: Trial) -> Iterator[Comparison]:
    """The numbers of parameters and of bytes are counted from the checkpoint's file and the settings; the memory is that of this step, and
    its largest part comes first."""
    rng, work = trial.rng("options"), _work(trial)
    accumulation, several, side = int(rng.integers(1, 4)), bool(rng.integers(2)), str(rng.choice(["left", "right"]))
    stored = load_file(CHECKPOINT / "model.safetensors")
    _, trained = split(work, {name: math.prod(shape) for name, shape in parameter_shapes(work.scalars).items()})
    trainable, frozen = sum(trained.values()), sum(value.size for value in stored.values())
    bits = sum(_bytes(name, value.shape, work) for name, value in stored.items())
    printed = trial.classifiers.summary(*_options(work, accumulation), f"--padding-side={side}", *["--multi-label"] * several)
    held = ("NF4 with double quantisation" if work.double_quantize else "NF4") if work.nf4 else work.dtype
    device = next(line for line in printed.splitlines() if line.startswith("device:"))
    yield from same("summary, dtype and base weights", f"{work.dtype}, base weights in {held}", device.partition(", ")[2])
    for part, expected in (
        ("parameters", f"{trainable:,} trainable, {frozen:,} frozen"),
        ("weights", f"{4 * trainable:,} bytes trainable, {bits:,} bytes frozen"),
        ("LoRA", f"rank {work.rank}, alpha {work.alpha:g}, on {', '.join(projections(work.targets))}"),
        ("head", f"{work.classes} {'labels' if several else 'classes'}, {work.pooling} pooling"),
        ("model", f"{work.family}, {work.layers} layers, hidden {work.hidden}, {CHECKPOINT}"),
        ("tokens", f"at most {work.seq}, padded on the {side}"),
        ("device", f"{work.dtype}, base weights in {_held_as(work)}"),
        ("steps", "automatic differentiation"),
    ):
        line = next((text for text in printed.splitlines() if text.startswith(f"{part}:")), "")
        if not line.endswith(expected):
            yield broken(f"summary, {part}", "another number", expected, line or printed)
    step = trial.memory.estimate(replace(work, accumulation=accumulation), "cuda", multi_label=several)
    rows = re.findall(r"^(\S.*?) +([\d.]+) MiB$", printed, re.MULTILINE)
    shown = {name: float(size) for name, size in rows}
    wanted = {name: size / MIB for name, size in {**step.parts, "total at the peak": step.total}.items()}
    yield from same("parts of the memory", sorted(wanted), sorted(shown))
    listed = [size for name, size in shown.items() if name in step.parts]
    yield from same("sizes of the parts in their order", sorted(listed, reverse=True), listed)
    yield from (
        value_at_most(f"{name}: |printed − counted| in MiB", abs(shown.get(name, np.inf) - wanted[name]), PRINTED) for name in wanted
    )


def _held_as(work: Workload) -> str:
    return ("NF4 with double quantisation" if work.double_quantize else "NF4") if work.nf4 else work.dtype


def _work(trial: Trial) -> Workload:
    """A training step on the shipped checkpoint, by the names of the reference."""
    rng, config = trial.rng("summary"), json.loads((CHECKPOINT / "config.json").read_text())
    heads, rank = config["num_attention_heads"], int(rng.integers(1, 9))
    return Workload(
        family=config["model_type"],
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config["hidden_size"] // heads,
        batch=int(rng.integers(1, 9)),
        seq=int(rng.integers(8, 65)),
        rank=rank,
        alpha=3.0 * rank + 0.5,
        targets=str(rng.choice(["q_v", "all"])),
        pooling=str(rng.choice(["mean", "last", "first"])),
        classes=int(rng.integers(2, 7)),
        nf4=trial.seed % 2 == 0,
        double_quantize=trial.seed % 4 == 0,
        dtype=str(rng.choice(list(BYTES))),
    )


def _options(work: Workload, accumulation: int) -> list[str]:
    values = {"lora-rank": work.rank, "lora-alpha": work.alpha, "num-classes": work.classes, "dtype": work.dtype, "backend": "torch"}
    values |= {"lora-targets": work.targets, "pooling": work.pooling}
    values |= {"batch-size": work.batch, "max-seq-len": work.seq, "accumulation-steps": accumulation}
    nf4 = ["--quantize-nf4" if work.nf4 else "--no-quantize-nf4"] + ["--double-quantize"] * work.double_quantize
    return [f"--model={CHECKPOINT}", "--memory", *nf4, *(f"--{name}={value}" for name, value in values.items())]


def _bytes(name: str, shape: tuple[int, ...], work: Workload) -> int:
    """The bytes of a frozen tensor: in NF4 half a byte a weight of a projection, and its scales."""
    count = math.prod(shape)
    if work.nf4 and name.endswith("_proj.weight"):
        return (count + 1) // 2 + scale_bytes(count, work.double_quantize)
    return BYTES[work.dtype] * count
