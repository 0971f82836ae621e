"""A GPU beside the CPU of its host: forward speed, and training samples a second, of the classifier on Qwen2.5-0.5B's shape with NF4.

    python -m benchmarks.device_speed [--device cuda] [--json FILE]

Both forward passes are of random weights in NF4 and the same 32 samples of 128 tokens, in bfloat16; the CPU computes on all its cores, or
on `--threads` of them. Training is one optimiser step on such a batch, by both backends. Times are the median of some runs after others
that warm up. Ends with 6 on a host without a CUDA device.
"""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks import command
from benchmarks.memory import CLASSES, MODELS, Setting, classifier_on, host
from benchmarks.timing import now
from blackswan.impl.classifier import Classifier
from blackswan.impl.device import EXIT_STATUS, resolve_device, set_tf32
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.trainer import Batch, Trainer

BATCH, SEQ = 32, 128
WARM_UP = {"cpu": 1, "cuda": 5}
RUNS = {"cpu": 3, "cuda": 30}


def batch_on(setting: Setting, device: torch.device) -> Batch:
    """The same tokens on every device, none of them padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, MODELS[setting.model].vocab, (BATCH, SEQ), generator=generator)
    labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    return Batch(ids.to(device), torch.ones_like(ids, dtype=torch.bool).to(device), labels.to(device))


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The median over RUNS of a run's time to its end on the device."""
    taken = []
    for index in range(WARM_UP[device.type] + RUNS[device.type]):
        start = now(device)
        run()
        if index >= WARM_UP[device.type]:
            taken.append(now(device) - start)
    return statistics.median(taken)


def forward_seconds(setting: Setting, device: torch.device) -> float:
    """Logits of a batch, without gradients."""
    classifier, batch = classifier_on(setting, device), batch_on(setting, device)
    with torch.inference_mode():
        return seconds(lambda: classifier(batch.input_ids, batch.mask), device)


def step_seconds(setting: Setting, device: torch.device) -> float:
    """One optimiser step on a batch, by the setting's backend."""
    trainer, batch = _trainer(setting, classifier_on(setting, device)), batch_on(setting, device)
    return seconds(lambda: trainer.train_batch(batch), device)


def _trainer(setting: Setting, classifier: Classifier) -> Trainer:
    settings: dict[str, Any] = {"total_steps": None, "micro_batch": BATCH, "learning_rate": 1e-4}
    return FusedTrainer(classifier, longest=SEQ, **settings) if setting.backend == "fused" else Trainer(classifier, **settings)


def measured(model: str, device: torch.device) -> dict[str, Any]:
    """Seconds of a forward pass on either device and their ratio; samples a second of training on the GPU."""
    forward = {where.type: forward_seconds(Setting(model, True, "bfloat16"), where) for where in (torch.device("cpu"), device)}
    backends = {backend: step_seconds(Setting(model, True, "bfloat16", backend=backend), device) for backend in ("torch", "fused")}
    return {
        "forward_seconds": forward,
        "forward_ratio": forward["cpu"] / forward[device.type],
        "step_seconds": backends,
        "samples_per_second": {backend: BATCH / taken for backend, taken in backends.items()},
    }


def main() -> int:
    """The ratios on standard output; 6 without a CUDA device."""
    options = _options()
    device = resolve_device(options.device)
    if device.type != "cuda":
        raise command.CannotRun(f"a CUDA device is compared with the CPU: --device {options.device} is the CPU", EXIT_STATUS)
    set_tf32(False)
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    found = measured(options.model, device)
    shape = {"model": options.model, "batch": BATCH, "seq": SEQ, "nf4": True, "dtype": "bfloat16"}
    report = {**host(device), **shape, "cpu": _processor(), "threads": torch.get_num_threads(), "runs": RUNS, **found}
    _print(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=command.device, default="cuda")
    parser.add_argument("--model", choices=("toy", "qwen2.5-0.5b"), default="qwen2.5-0.5b")
    parser.add_argument("--threads", type=command.positive, help="of the CPU (default: one for each of its cores)")
    parser.add_argument("--json", type=command.output)
    return parser.parse_args()


def _processor() -> str:
    """The processor's name where Linux tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _print(report: dict[str, Any]) -> None:
    forward = report["forward_seconds"]
    where = f"{report['device']} and {report['cpu']} ({report['threads']} threads)"
    print(f"{report['model']}, NF4, bfloat16, {BATCH} samples of {SEQ} tokens; {where}")
    print(f"forward   CPU {forward['cpu'] * 1e3:10.1f} ms   GPU {forward['cuda'] * 1e3:8.2f} ms   ratio {report['forward_ratio']:8.1f}")
    for backend, rate in report["samples_per_second"].items():
        print(f"training  {backend:6} {report['step_seconds'][backend] * 1e3:10.2f} ms a step   {rate:10.0f} samples/s")


if __name__ == "__main__":
    command.start(main)
