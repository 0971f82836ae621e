"""The estimate of device memory beside what a training step is then measured to take.

    python -m benchmarks.memory [--device cuda] [--models toy qwen2.5-0.5b qwen3-4b] [--json FILE]

Of both backends: automatic differentiation (`Trainer`) and hand-written layers (`FusedTrainer`), the latter on a CUDA device only. There
the measure is torch.cuda.max_memory_allocated over loading and some optimiser steps; the command ends with 1 where an estimate is more
than TOLERANCE away from it. On the CPU the measure is a count of the step's allocations, for the toy model only.
benchmarks/results/memory-h200.json holds what was measured (`--json` writes a file like it), and tests/test_memory_benchmark.py the
estimates to it.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks import command
from blackswan.falsifiers.numeric.whole_model import SHAPES
from blackswan.falsifiers.subjects.impl.memory import RandomTensors
from blackswan.impl.allocations import Allocations
from blackswan.impl.classifier import Adaptation, Classifier, base_shapes, initial_trainable
from blackswan.impl.config import DecoderConfig
from blackswan.impl.device import resolve_device, set_tf32
from blackswan.impl.fused.memory import estimate_fused
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.kernels import missing
from blackswan.impl.memory import Estimate, estimate
from blackswan.impl.trainer import Batch, Trainer

TOLERANCE = 0.10
BATCH, SEQ, CLASSES, RANK = 16, 256, 5, 16
MODELS = {
    "toy": DecoderConfig("qwen2", 512, 256, 768, 4, 8, 2, 32, 1e-6, 1e4, True, 512),
    **{name: DecoderConfig(**shape, eps=1e-6, tied=True, max_positions=32_768) for name, shape in SHAPES.items()},
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    model: str
    nf4: bool
    dtype: str
    targets: str = "q_v"
    accumulation: int = 1
    backend: str = "torch"
    pooling: str = "mean"

    def adaptation(self) -> Adaptation:
        """What is added to the model."""
        return Adaptation(CLASSES, RANK, 2.0 * RANK, self.targets, self.pooling, self.nf4)

    def estimate(self, device: torch.device) -> Estimate:
        """What the step is estimated to need."""
        dtype = DTYPES[self.dtype]
        if self.backend == "fused":
            return estimate_fused(MODELS[self.model], self.adaptation(), BATCH, SEQ, dtype)
        return estimate(MODELS[self.model], self.adaptation(), BATCH, SEQ, dtype, accumulation=self.accumulation, device=device)


def settings(models: list[str], device: torch.device) -> Iterator[Setting]:
    """Each model with NF4 and without, in both dtypes; and all targets, and accumulation, once. On CUDA the other backend as well."""
    for model in models:
        for dtype in DTYPES:
            yield Setting(model, True, dtype)
            yield Setting(model, False, dtype)
        yield Setting(model, True, "bfloat16", accumulation=4)
        if model != "qwen3-4b":
            yield Setting(model, True, "bfloat16", targets="all")
        if device.type == "cuda":
            for nf4 in (True, False):
                yield Setting(model, nf4, "bfloat16", backend="fused", pooling="last")


def classifier_on(setting: Setting, device: torch.device) -> Classifier:
    """The setting's classifier with random weights."""
    config, dtype = MODELS[setting.model], DTYPES[setting.dtype]
    trainable = initial_trainable(config, setting.adaptation(), 0)
    base = RandomTensors(base_shapes(config), dtype, device)
    return Classifier(config, setting.adaptation(), base, trainable, dtype=dtype, device=device)


def fused_steps(setting: Setting, device: torch.device) -> None:
    """Loads and makes five optimiser steps, of which the first is captured."""
    settings = {"total_steps": None, "micro_batch": BATCH, "learning_rate": 1e-4}
    trainer = FusedTrainer(classifier_on(setting, device), longest=SEQ, **settings)
    for _ in range(5):
        trainer.train_batch(_batch(MODELS[setting.model], device))


def step(setting: Setting, device: torch.device) -> int:
    """Loads and makes two optimiser steps. Bytes that autograd saved in one forward pass, weights that are there anyway left out."""
    classifier = classifier_on(setting, device)
    trainer = Trainer(classifier, total_steps=None, micro_batch=BATCH, learning_rate=1e-4)
    kept = {value.untyped_storage()._cdata for value in (*classifier.parameters(), *classifier.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    for index in range(2):
        for micro in range(setting.accumulation):
            batch = _batch(MODELS[setting.model], device)
            with torch.autograd.graph.saved_tensors_hooks(pack if index == micro == 0 else lambda tensor: tensor, lambda tensor: tensor):
                trainer.accumulate(batch)
        trainer.apply()
    return sum(saved.values())


def _batch(config: DecoderConfig, device: torch.device) -> Batch:
    ids = torch.randint(0, config.vocab, (BATCH, SEQ), device=device)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.randint(0, CLASSES, (BATCH,), device=device))


def measured(setting: Setting, device: torch.device) -> Mapping[str, int]:
    """`peak` bytes of loading and the steps and, where autograd runs them, the bytes `saved` for the backward pass of one."""
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # they outlive a step, and each setting is measured as if alone in its process
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        if setting.backend == "fused":
            fused_steps(setting, device)
            return {"peak": torch.cuda.max_memory_allocated(device)}
        saved = step(setting, device)
        return {"peak": torch.cuda.max_memory_allocated(device), "saved": saved}
    with Allocations("cpu", block=1) as allocations:
        saved = step(setting, device)
    return {"peak": allocations.peak, "saved": saved}


def row(setting: Setting, device: torch.device) -> dict[str, Any]:
    """Estimate and, where it can be measured, what was measured."""
    expected = setting.estimate(device)
    found: dict[str, Any] = {**vars(setting), "estimate": expected.total, "parts": dict(expected.parts)}
    if device.type == "cuda" or setting.model == "toy":
        found |= measured(setting, device)
        found["ratio"] = found["estimate"] / found["peak"]
    return found


def main() -> int:
    """The table on standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=command.device, default="auto")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=command.output)
    arguments = parser.parse_args()
    device = resolve_device(arguments.device)
    if device.type == "cuda":
        set_tf32(False)
    rows = []
    print(
        f"{'model':13} {'backend':8} {'base':5} {'dtype':9} {'targets':7} {'pooling':7} {'accum':>5} {'estimate':>10} {'measured':>10} "
        f"{'ratio':>6}  largest parts, MiB"
    )
    for setting in settings(arguments.models, device):
        found = row(setting, device)
        rows.append(found)
        print(_line(found), flush=True)
    if arguments.json:
        kept = [{key: value for key, value in found.items() if key not in ("estimate", "parts", "ratio")} for found in rows]
        arguments.json.write_text(json.dumps({**host(device), "batch": BATCH, "seq": SEQ, "rows": kept}, indent=1) + "\n")
    wrong = [found for found in rows if "ratio" in found and abs(found["ratio"] - 1) > TOLERANCE]
    print(f"{len(wrong)} of {sum('ratio' in found for found in rows)} measured steps are more than {TOLERANCE:.0%} away from the estimate")
    return int(bool(wrong))


def host(device: torch.device) -> dict[str, str]:
    """What the numbers depend on: the device's name, and the versions of torch and, where it is installed, Triton."""
    triton = {"triton": version("triton")} if missing() is None else {}
    return {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu", "torch": torch.__version__, **triton}


def _line(found: Mapping[str, Any]) -> str:
    largest = sorted(found["parts"].items(), key=lambda item: -item[1])[:5]
    parts = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in largest)
    saved = f"; saved {found['saved'] / 2**20:.1f}" if "saved" in found else ""
    peak = f"{found['peak'] / 2**20:10.1f} {found['ratio']:6.3f}" if "ratio" in found else f"{'-':>10} {'-':>6}"
    base = "nf4" if found["nf4"] else "plain"
    return (
        f"{found['model']:13} {found['backend']:8} {base:5} {found['dtype']:9} {found['targets']:7} {found['pooling']:7} "
        f"{found['accumulation']:5} "
        f"{found['estimate'] / 2**20:10.1f} {peak}  {parts}{saved}"
    )


if __name__ == "__main__":
    command.start(main)
