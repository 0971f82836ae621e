"""Operations by themselves: of numbers in float64, and whose memory they read and write."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np

from blackswan import reference
from blackswan.falsifiers.numeric.comparison import Comparison, value_at_most
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial

Asked = tuple[str, dict[str, Any], dict[str, Any]]
"""An operation, its inputs and its scalars."""

BESIDE_16_BITS = 2.0**-20
"""An error may be such a share of the largest number, or of 1: sixteen roundings of float32. One of float16 is 512 times as
much."""


def operations_keep_float64(trial: Trial) -> Iterator[Comparison]:
    """Each operation of arrays in float64 gives what the reference gives, and losses and steps beside an array in 16 bits what float32
    gives."""
    rng = trial.rng("operations")
    for operation, inputs, scalars in [*_of_models(rng), *_of_losses(rng), *_of_steps(rng)]:
        expected = reference.evaluate(operation, inputs, scalars)
        found = trial.devices.operate(operation, {**inputs, **scalars}, "torch")
        for (name, value), actual in zip(expected.items(), found, strict=True):
            yield trial.near(f"{operation} {name}", value, actual)
    yield from _beside_16_bits(trial, rng)


def _beside_16_bits(trial: Trial, rng: Generator) -> Iterator[Comparison]:
    """Losses and steps with one of their arrays in 16 bits are those of its numbers and of the others', to some roundings of float32."""
    for operation, inputs, scalars in [*_of_losses(rng), *_of_steps(rng)]:
        reals = {name: value for name, value in inputs.items() if value.dtype.kind == "f"}
        for narrow in reals:
            given = inputs | {name: value.astype(np.float16 if name == narrow else np.float32) for name, value in reals.items()}
            expected = reference.evaluate(operation, given | {name: given[name].astype(np.float64) for name in reals}, scalars)
            found = trial.devices.operate(operation, {**given, **scalars}, "torch")
            for (name, value), actual in zip(expected.items(), found, strict=True):
                off = np.abs(actual - value).max() / max(1.0, np.abs(value).max())
                yield value_at_most(f"{operation} with {narrow} in 16 bits: error of {name}", off, BESIDE_16_BITS)


def operations_of_many_rows(trial: Trial) -> Iterator[Comparison]:
    """Each operation gives for a million rows, in which some are there again and again, what it gives for these; so do its gradients, of
    which that of a weight is the sum over all rows. Codes of NF4 are the same."""
    for name, expected, actual in trial.devices.many_rows():
        if expected.dtype.kind == "f":
            yield trial.near(name, expected, actual)
        else:
            yield from same(name, expected, actual)


def operations_own_their_memory(trial: Trial) -> Iterator[Comparison]:
    """Each operation answers in memory of its own, forward and backward, and leaves its arguments and the state of the process as they are.

    The operations are asked with and without gradients, in float32 by each backend and in bfloat16 by torch.
    """
    rng = trial.rng("operations")
    for operation, inputs, scalars in [*_of_models(rng), *_of_losses(rng), *_of_steps(rng), *_of_nf4(rng)]:
        backends = [*((backend, "float32") for backend in trial.devices.backends(operation)), ("torch", "bfloat16")]
        for (backend, dtype), gradients in product(backends, (False, True)):
            said = trial.ownership.of_memory(operation, inputs, scalars, dtype, backend, gradients)
            how = f"in {dtype} by {backend}, {'with' if gradients else 'without'} gradients"
            yield from same(f"{operation} {how}", {"what is wrong about memory": ""}, {"what is wrong about memory": said})


def _of_models(rng: Generator) -> Iterator[Asked]:
    batch, seq, hidden = (int(size) for size in rng.integers(2, 9, 3))
    weight, mask = rng.uniform(0.5, 2.0, hidden), np.arange(batch * seq).reshape(batch, seq) != seq - 1
    x, rows = rng.normal(size=(batch, seq, hidden)), rng.normal(size=(batch, hidden))
    heads, positions = rng.normal(size=(batch, seq, 2, 6)), np.tile(np.arange(seq), (batch, 1))
    factors = {"lora_a": rng.normal(size=(2, hidden)), "lora_b": rng.normal(size=(3, 2))}
    matrix = {"weight": rng.normal(size=(3, hidden))}
    yield "embedding", {"input_ids": rng.integers(0, batch, (2, seq)), "weight": rows}, {}
    yield "linear", {"x": x, **matrix, "bias": rng.normal(size=3)}, {}
    yield "residual_add", {"x": x, "branch": x[::-1].copy()}, {}
    yield "rms_norm", {"x": x, "weight": weight}, {"eps": 1e-6}
    yield "qk_norm", {"x": heads, "weight": rng.uniform(0.5, 2.0, 6)}, {"eps": 1e-6}
    yield "rope", {"x": heads, "positions": positions + int(rng.integers(1000))}, {"theta": 10000.0}
    yield "attention", {"q": heads, **{name: rng.normal(size=(batch, seq, 1, 6)) for name in "kv"}, "mask": mask}, {}
    yield "softmax", {"x": rows}, {}
    yield "swiglu", {"gate": x, "up": x[::-1].copy()}, {}
    yield from (("pool", {"x": x, "mask": mask}, {"mode": mode}) for mode in ("mean", "last", "first"))
    yield "lora_linear", {"x": x, **matrix, **factors, "bias": rng.normal(size=3)}, {"alpha": 3.0}
    for operation, times in product(("lora_merge", "lora_unmerge"), (1, 0)):  # an adapter has a B of zeros before its first step
        yield operation, {**matrix, **factors, "lora_b": times * factors["lora_b"]}, {"alpha": 3.0}


def _of_losses(rng: Generator) -> Iterator[Asked]:
    batch, classes = (int(size) for size in rng.integers(2, 9, 2))
    labels, mask = rng.integers(0, classes, batch), np.ones((1, batch), bool)
    logits = rng.normal(size=(batch, classes))
    yield "weighted_cross_entropy", {"logits": logits, "labels": labels, "class_weights": rng.uniform(0.5, 2.0, classes)}, {}
    yield "cross_entropy_per_sample", {"logits": logits, "labels": labels}, {}
    yield "bce_with_logits", {"logits": logits, "targets": rng.random((batch, classes))}, {}
    yield "lm_cross_entropy", {"logits": logits[None], "input_ids": labels[None], "mask": mask}, {}


def _of_steps(rng: Generator) -> Iterator[Asked]:
    rows, count = (int(size) for size in rng.integers(2, 9, 2))
    gradients = rng.normal(size=(rows, count))
    moments = {name: np.abs(rng.normal(size=count)) for name in ("parameter", "gradient", "exp_avg", "exp_avg_sq")}
    settings = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    yield "adamw_step", moments, {"step": int(rng.integers(1, 2000)), **settings}
    yield from (("clip_by_global_norm", {"gradients": gradients}, {"max_norm": norm}) for norm in (0.5, 1e6))
    yield "learning_rate_schedule", {}, {"total_steps": 5, "peak": 0.1, "warmup_fraction": 0.25, "kind": "linear"}
    counts = rng.integers(1, 2**18, rows)
    yield from (("average_gradients", {"gradients": gradients[:some], "counts": counts[:some]}, {}) for some in (rows, 1))


def _of_nf4(rng: Generator) -> Iterator[Asked]:
    rows, columns, block = int(rng.integers(2, 5)), 2 * int(rng.integers(40, 80)), 64
    weight = {"weight": rng.normal(size=(rows, columns))}
    stored = reference.evaluate("nf4_quantize", weight, {"block_size": block})
    sizes = {"block_size": block, "rows": rows, "columns": columns}
    yield "nf4_quantize", weight, {"block_size": block}
    yield "nf4_dequantize", stored, sizes
    yield "nf4_linear", {"x": rng.normal(size=(3, columns)), **stored}, {"in_features": columns, "out_features": rows, "block_size": block}
    doubled = reference.evaluate("nf4_double_quantize", {"absmax": stored["absmax"]}, {})
    yield "nf4_double_quantize", {"absmax": stored["absmax"]}, {}
    yield "nf4_double_dequantize", doubled, {}
