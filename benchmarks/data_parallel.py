"""Data-parallel training beside one worker's, on random weights: the same weights on all workers, the same loss, how much faster.

    torchrun --nproc-per-node 2 benchmarks/data_parallel.py --device cuda --model qwen2.5-0.5b --output FILE.json

Rank 0 first trains alone, on the whole batches that all workers then train on together. `weak` gives each worker as many samples as the
one had. A GPU trains through the hand-written layers, as `python -m impl train` does, unless `--backend torch` asks for automatic
differentiation. Exit status 1 where the workers end with different weights, or where a loss is further from one worker's than --tolerance.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from benchmarks import command, timing
from benchmarks.step_inputs import ALPHA, CLASSES, MODELS, RANK, RATE
from blackswan.impl.classifier import Adaptation, Classifier, base_shapes, initial_trainable
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import random_tensors
from blackswan.impl.fused.step import FusedTrainer, why_not
from blackswan.impl.group import ALONE, Group, joined, shard
from blackswan.impl.trainer import Batch, Trainer

WARM_UP = 3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Curve:
    """The loss of each step, samples per second after the warm-up, and the trainer at the end."""

    losses: list[float]
    rate: float
    trainer: Trainer


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains alone and together, prints what was found on rank 0, and writes it where asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="toy", help="shape of the model (default: toy)")
    parser.add_argument("--device", type=command.device, default="cpu", help="cuda with NCCL, or cpu with gloo (default: cpu)")
    parser.add_argument("--steps", type=command.positive, default=50, help="optimiser steps (default: 50)")
    parser.add_argument("--batch", type=command.positive, default=32, help="samples of a step (default: 32)")
    parser.add_argument("--micro", type=command.positive, default=16, help="samples of a forward pass (default: 16)")
    parser.add_argument("--seq", type=command.positive, default=128, help="tokens of a sample (default: 128)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of base weights and activations (default: float32)")
    parser.add_argument("--nf4", action="store_true", help="base weights in NF4")
    parser.add_argument("--backend", choices=("auto", "torch", "fused"), default="auto", help="as for training (default: auto)")
    parser.add_argument("--tolerance", type=command.positive_number, default=0.01, help="relative difference of a loss (default: 0.01)")
    parser.add_argument("--output", type=command.output, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args(arguments)
    if options.steps <= WARM_UP:
        parser.error(f"--steps {options.steps}: expected more than the {WARM_UP} of the warm-up")
    with joined(options.device) as (group, device):
        options.backend = _backend(options, device)
        report = _compared(options, group, device)
        if group.rank == 0:
            _print(report)
            if options.output is not None:
                options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if report["weights_equal"] and report["largest_loss_difference"] <= options.tolerance else 1


def _backend(options: argparse.Namespace, device: torch.device) -> str:
    """The backend that `auto` stands for, or the one that was asked for. Raises a CannotRun where it cannot run."""
    reason = why_not(DTYPES[options.dtype], device)
    if options.backend == "fused" and reason:
        raise command.CannotRun(f"--backend fused: {reason}")
    if options.backend != "auto":
        return str(options.backend)
    return "fused" if device.type == "cuda" and reason is None else "torch"


def _compared(options: argparse.Namespace, group: Group, device: torch.device) -> dict[str, Any]:
    config = DecoderConfig(**MODELS[options.model], eps=1e-6, tied=True, max_positions=max(options.seq, 512))
    tensors = {name: value for name, value in random_tensors(config, 0).items() if name in base_shapes(config)}

    def train(members: Group, samples: int) -> Curve:
        adaptation = Adaptation(CLASSES, RANK, ALPHA, nf4=options.nf4)
        trainable = initial_trainable(config, adaptation, 0)
        classifier = Classifier(config, adaptation, tensors, trainable, dtype=DTYPES[options.dtype], device=device)
        settings: dict[str, Any] = {"total_steps": options.steps, "micro_batch": options.micro, "learning_rate": RATE, "group": members}
        make = Trainer if options.backend == "torch" else partial(FusedTrainer, longest=options.seq)
        trainer = make(classifier, **settings)
        return _run(trainer, members, options, samples, config.vocab)

    alone = train(ALONE, options.batch) if group.rank == 0 else None
    group.gather_text("")  # the others begin when rank 0 has been alone
    together = train(group, options.batch)
    weak = train(group, options.batch * group.size)
    digests = [group.gather_text(_digest(curve.trainer)) for curve in (together, weak)]
    first = torch.tensor(alone.losses if alone else [0.0] * options.steps, dtype=torch.float64)
    losses = group.gather(first)[0].tolist()
    rate = float(group.gather(torch.tensor(alone.rate if alone else 0.0, dtype=torch.float64))[0])
    return {
        "model": options.model,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "backend": torch.distributed.get_backend() if group.size > 1 else None,
        "torch": torch.__version__,
        "workers": group.size,
        **{name: getattr(options, name) for name in ("steps", "batch", "micro", "seq", "dtype", "nf4", "backend")},
        "weights_equal": all(len(set(each)) == 1 for each in digests),
        "digests": digests,
        "losses_alone": losses,
        "losses_together": together.losses,
        "largest_loss_difference": max(abs(b - a) / abs(a) for a, b in zip(losses, together.losses, strict=True)),
        "samples_per_second": {"alone": rate, "together": together.rate, "weak": weak.rate},
        "scaling": {"together": together.rate / rate, "weak": weak.rate / rate},
    }


def _run(trainer: Trainer, group: Group, options: argparse.Namespace, samples: int, vocab: int) -> Curve:
    generator, device = torch.Generator().manual_seed(1), trainer.optimiser.exp_avg.device
    losses, start = [], 0.0
    for step in range(options.steps):
        if step == WARM_UP:
            start = timing.now(device)
        ids = torch.randint(vocab, (samples, options.seq), generator=generator)
        labels = torch.randint(CLASSES, (samples,), generator=generator)
        rows = shard(range(samples), group.rank, group.size)
        mask = torch.ones(len(rows), options.seq, dtype=torch.bool, device=device)
        losses.append(trainer.train_batch(Batch(ids[rows].to(device), mask, labels[rows].to(device))).loss)
    return Curve(losses, (options.steps - WARM_UP) * samples / (timing.now(device) - start), trainer)


def _digest(trainer: Trainer) -> str:
    """Of the bytes of every trainable tensor and both moments."""
    digest = hashlib.sha256()
    for name, value in trainer.state().items():
        content: Tensor = value.detach().cpu().contiguous()
        digest.update(name.encode() + content.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _print(report: dict[str, Any]) -> None:
    rates, scaling = report["samples_per_second"], report["scaling"]
    print(f"{report['model']} on {report['workers']} × {report['device']} ({report['backend']}), torch {report['torch']}")
    held = f"{report['dtype']}{', NF4' * report['nf4']}, backend {report['backend']}"
    print(f"{report['steps']} steps of {report['batch']} samples of {report['seq']} tokens, {held}")
    print(f"weights and moments on all workers: {'equal, bit for bit' if report['weights_equal'] else 'DIFFERENT'}")
    print(f"loss of the last step: alone {report['losses_alone'][-1]:.6f}, together {report['losses_together'][-1]:.6f}")
    print(f"largest relative difference of a loss: {report['largest_loss_difference']:.2e}")
    print(f"samples/s: alone {rates['alone']:.1f}, together {rates['together']:.1f} (× {scaling['together']:.2f})", end="")
    print(f", with {report['workers']} times the samples {rates['weak']:.1f} (× {scaling['weak']:.2f})", flush=True)


if __name__ == "__main__":
    command.start(main)
