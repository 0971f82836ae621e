"""What every contender of the training step gets: the same shape, weights, factors and batches."""

import argparse
from typing import Any

from benchmarks.command import positive
from blackswan.falsifiers.numeric.whole_model import SHAPES

TOY = {
    "family": "qwen2", "vocab": 512, "hidden": 128, "intermediate": 256, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32,
    "theta": 1e6,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"toy": TOY, **SHAPES}
CLASSES, RANK, ALPHA, RATE = 5, 16, 32.0, 2e-4


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a contender has to know."""
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-0.5b")
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--seq", type=positive, default=256)
    parser.add_argument("--lengths", choices=("full", "mixed"), default="full", help="all samples as long as --seq, or a realistic mix")
    parser.add_argument("--steps", type=positive, default=20)
    parser.add_argument("--bf16", action="store_true", help="base weights in bfloat16 instead of NF4")


def arguments(options: argparse.Namespace) -> list[str]:
    """The same options as a command line has them."""
    found = [f"--{name}={getattr(options, name)}" for name in ("model", "batch", "seq", "lengths", "steps")]
    return found + ["--bf16"] * options.bf16


def batches_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One batch of full sequences, or eight of a log-normal mix of lengths (median a quarter of the longest), tokens on the right."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape, vocab = (options.batch, options.seq), MODELS[options.model]["vocab"]
    found = []
    for _ in range(1 if options.lengths == "full" else 8):
        lengths = torch.full((options.batch,), options.seq)
        if options.lengths == "mixed":
            drawn = torch.exp(torch.randn(options.batch, generator=generator) * 0.7) * options.seq / 4
            lengths = drawn.round().long().clamp(1, options.seq)
        mask = torch.arange(options.seq) < lengths[:, None]
        ids = torch.randint(1, vocab, shape, generator=generator).masked_fill(~mask, 0)
        longest = int(lengths.max())  # a batch is padded to its longest sample, as a collator does
        labels = torch.randint(0, CLASSES, (options.batch,), generator=generator)
        found.append({"input_ids": ids[:, :longest].cuda(), "mask": mask[:, :longest].cuda(), "labels": labels.cuda()})
    return found


def config_of(options: argparse.Namespace) -> Any:
    """The decoder's architecture."""
    from blackswan.impl.config import DecoderConfig

    return DecoderConfig(**MODELS[options.model], eps=1e-6, tied=True, max_positions=32768)


def tensors_of(options: argparse.Namespace) -> dict[str, Any]:
    """The same bfloat16 weights for everybody; biases and norms are not trivial."""
    import torch

    from blackswan.impl.decoder import parameter_shapes

    generator = torch.Generator("cuda").manual_seed(2)
    tensors = {}
    for name, shape in parameter_shapes(config_of(options)).items():
        noise = torch.randn(shape, generator=generator, device="cuda")
        around = 1.0 if len(shape) == 1 and name.endswith("norm.weight") else 0.0
        tensors[name] = (around + (0.02 if len(shape) > 1 else 0.1) * noise).bfloat16()
    return tensors


def factors_of(options: argparse.Namespace) -> dict[str, Any]:
    """The same LoRA factors and head for everybody, B not zero, the head's bias zero (transformers' heads have none)."""
    import torch

    from blackswan.impl.classifier import trainable_shapes

    generator = torch.Generator("cuda").manual_seed(3)
    shapes = trainable_shapes(config_of(options), adaptation_of(options))
    made = {name: 0.02 * torch.randn(shape, generator=generator, device="cuda") for name, shape in shapes.items()}
    return made | {"score.bias": torch.zeros_like(made["score.bias"])}


def adaptation_of(options: argparse.Namespace) -> Any:
    """LoRA on queries and values, pooling by the last token."""
    from blackswan.impl.classifier import Adaptation

    return Adaptation(CLASSES, RANK, ALPHA, "q_v", "last", not options.bf16)
