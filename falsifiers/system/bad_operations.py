"""Operations whose arrays do not belong together, or whose settings are outside of their bounds."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, value_at_most
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial

Bad = tuple[str, dict[str, Any], str]
"""An operation, what of its arguments is another, and what the refusal has to name."""
BLOCK = 64
LARGE = 6e4
"""A number that float16 holds, and no sum of two of them."""
MANY = 2**20
"""More numbers than are looked at together by whoever looks at them in parts."""
MANY_LOGITS = 2**24
"""As many logits of a language model, which are the largest tensor of a step."""
LOSSES = ("weighted_cross_entropy", "cross_entropy_per_sample", "bce_with_logits", "lm_cross_entropy")


def operations_refuse(trial: Trial) -> Iterator[Comparison]:
    """Each operation answers what is whole, and refuses it with one array or number made bad in each way in which it can be,
    in the memory of the whole one.

    Logits are whole too where their sum is no number of float16, and so are vectors beside infinite padding. Of shapes these
    are such as a library would broadcast without a word.
    """
    rng = trial.rng("operations")
    whole = _whole(rng)
    backends = {operation: trial.devices.backends(operation) for operation in whole}
    for operation, arguments in whole.items():
        for backend in backends[operation]:
            trial.devices.operate(operation, arguments, backend)
    for operation in LOSSES:  # of finite logits, which add up to none
        logits = whole[operation]["logits"]
        trial.devices.operate(operation, whole[operation] | {"logits": np.full(logits.shape, LARGE, np.float16)}, "torch")
    yield _padded_without_end(trial, whole["pool"])
    yield from _narrow_integers(trial, rng, backends)
    for operation, changes, message in [*_of_losses(rng, whole), *_of_models(whole), *_of_steps(rng, whole), *_of_many(whole)]:
        what = " and ".join(f"{name} {value.shape if np.ndim(value) else value}" for name, value in changes.items())
        for backend in backends[operation]:
            ask = partial(trial.devices.operate_again, operation, whole[operation], whole[operation] | changes, backend)
            yield trial.refuses(f"{operation} by {backend} of {what}", ask, message, "ValueError|FloatingPointError")


def _narrow_integers(trial: Trial, rng: Generator, backends: dict[str, list[str]]) -> Iterator[Comparison]:
    """Labels, and tokens beside padding, up to the last number of a byte are taken in 8, 32 and 64 bits, and give the same losses."""
    classes = 256
    labels, mask = np.array([0, 255, 100, int(rng.integers(classes)), 156]), np.array([True, True, True, False, False])
    logits = _normal(rng, len(labels), classes)
    tokens = {"logits": logits[None], "mask": mask[None]}
    asked = [(operation, "labels", labels, {"logits": logits}) for operation in ("weighted_cross_entropy", "cross_entropy_per_sample")]
    for operation, name, numbers, others in (*asked, ("lm_cross_entropy", "input_ids", labels[None], tokens)):
        for backend in backends[operation]:
            wide, *narrow = (
                trial.devices.operate(operation, {**others, name: numbers.astype(dtype)}, backend)
                for dtype in (np.int64, np.int32, np.uint8)
            )
            for each in narrow:
                yield from same(f"{operation} by {backend} of narrow {name}", wide, each)


def _padded_without_end(trial: Trial, whole: dict[str, Any]) -> Comparison:
    """The mean of real tokens beside infinite padding is theirs, to a rounding of float32 for each of them."""
    x, mask = whole["x"].copy(), whole["mask"].copy()
    x[:, -1], mask[:, -1] = np.inf, False
    (pooled,) = trial.devices.operate("pool", whole | {"x": x, "mask": mask}, "torch")
    off = np.abs(pooled - x[:, :-1].astype(np.float64).mean(axis=1)).max()
    return value_at_most("mean beside infinite padding: error", off, 2.0**-23 * np.abs(x[:, :-1]).sum(axis=1).max())


def _whole(rng: Generator) -> dict[str, dict[str, Any]]:
    """Arguments of each operation that it takes."""
    batch, seq, classes, vocab = (int(size) for size in rng.integers(2, 6, 4))
    logits, labels = _normal(rng, batch, classes), rng.integers(0, classes, batch)
    ids, mask = rng.integers(0, vocab, (batch, seq)), np.ones((batch, seq), bool)
    rows, columns = int(rng.integers(2, 5)), 2 * int(rng.integers(1, 80))
    blocks = -(-rows * columns // BLOCK)
    moments = {name: np.abs(_normal(rng, 3)) for name in ("parameter", "gradient", "exp_avg", "exp_avg_sq")}
    return {
        "weighted_cross_entropy": {"logits": logits, "labels": labels, "class_weights": rng.uniform(0.5, 2, classes).astype(np.float32)},
        "cross_entropy_per_sample": {"logits": logits, "labels": labels},
        "bce_with_logits": {"logits": logits, "targets": rng.integers(0, 2, (batch, classes)).astype(np.float32)},
        "lm_cross_entropy": {"logits": _normal(rng, batch, seq, vocab), "input_ids": ids, "mask": mask},
        "embedding": {"input_ids": ids, "weight": _normal(rng, vocab, 4)},
        "pool": {"x": _normal(rng, batch, seq, 4), "mask": mask, "mode": "mean"},
        "attention": {"q": _normal(rng, batch, seq, 6, 4), **{name: _normal(rng, batch, seq, 3, 4) for name in "kv"}, "mask": mask},
        "rope": {"x": _normal(rng, batch, seq, 2, 4), "positions": np.arange(batch * seq).reshape(batch, seq), "theta": 1e4},
        "nf4_quantize": {"weight": _normal(rng, rows, columns), "block_size": BLOCK},
        "nf4_dequantize": {
            "codes": rng.integers(0, 256, rows * columns // 2).astype(np.uint8),
            "absmax": np.ones(blocks, np.float32),
            **{"rows": rows, "columns": columns, "block_size": BLOCK},
        },
        "nf4_double_dequantize": {
            "codes": rng.integers(0, 256, 600).astype(np.uint8),
            "scales": rng.uniform(0.5, 2, 3).astype(np.float32),
            "offset": np.ones(1, np.float32),
        },
        "average_gradients": {"gradients": _normal(rng, batch, 3), "counts": rng.integers(1, 9, batch)},
        "clip_by_global_norm": {"gradients": _normal(rng, batch, 3), "max_norm": 1.0},
        "adamw_step": {**moments, "step": 1, "learning_rate": 0.1},
        "learning_rate_schedule": {"total_steps": 5, "peak": 0.1, "warmup_fraction": float(rng.choice([0.0, 1.0])), "kind": "linear"},
    }


def _of_losses(rng: Generator, whole: dict[str, dict[str, Any]]) -> Iterator[Bad]:
    logits, labels = (whole["weighted_cross_entropy"][name] for name in ("logits", "labels"))
    batch, classes = logits.shape
    weights = whole["weighted_cross_entropy"]["class_weights"]
    for value in (0.0, -1.0, np.nan, np.inf):
        yield _with("weighted_cross_entropy", "class_weights", rng, weights, value)
    for shape in (1, classes + 1, (1, classes), (classes, 1)):
        yield "weighted_cross_entropy", {"class_weights": np.ones(shape, np.float32)}, "class_weights"
    for operation in ("weighted_cross_entropy", "cross_entropy_per_sample"):
        yield from ((operation, {"labels": each}, "label") for each in (labels[:1], labels[:, None], labels[None], labels + 0.25))
        yield from (_with(operation, "labels", rng, labels, value, f".* from 0 to {classes - 1}$") for value in (-1, classes))
        yield operation, {"logits": logits[:0], "labels": labels[:0]}, "empty"
    targets = whole["bce_with_logits"]["targets"]
    for other in (targets[:1], targets[:, :1], targets[0], targets.T.copy() if batch != classes else targets[None]):
        yield "bce_with_logits", {"targets": other}, "shape"
    for value in (-0.125, 1.125, np.nan):
        yield _with("bce_with_logits", "targets", rng, targets, value, ".* 0 to 1$")
    yield "bce_with_logits", {"logits": logits[:0], "targets": targets[:0]}, "empty"
    for operation in ("cross_entropy_per_sample", "bce_with_logits", "lm_cross_entropy"):
        yield _with(operation, "logits", rng, whole[operation]["logits"], rng.choice([np.nan, np.inf, -np.inf]))


def _of_models(whole: dict[str, dict[str, Any]]) -> Iterator[Bad]:
    vocab, ids = len(whole["embedding"]["weight"]), whole["embedding"]["input_ids"]
    for operation in ("embedding", "lm_cross_entropy"):
        others = (np.where(ids == ids[-1, -1], value, ids) for value in (-1, vocab))
        yield operation, {"input_ids": ids + 0.25}, "input_ids"
        yield from ((operation, {"input_ids": each}, _named("input_ids", ids, each) + f".* from 0 to {vocab - 1}$") for each in others)
    yield from (("pool", {"mode": mode}, "pooling") for mode in ("max", "", "Mean"))
    last = np.arange(len(ids)) == len(ids) - 1
    yield "pool", {"mask": ~last[:, None] & whole["pool"]["mask"]}, rf"mask\[{len(ids) - 1}\]"
    yield "rope", {"positions": whole["rope"]["positions"] + 0.25}, "positions"
    yield from (("attention", {"q": whole["attention"]["q"][:, :, :heads]}, "multiple") for heads in (5, 2))
    for block_size in (0, 1, 48, 8192):
        yield from ((operation, {"block_size": block_size}, "block size") for operation in ("nf4_quantize", "nf4_dequantize"))
    for name in ("codes", "absmax"):
        value = whole["nf4_dequantize"][name]
        yield from (("nf4_dequantize", {name: each}, name) for each in (value[:-1], np.concatenate([value, value[:1]])))
    yield "nf4_dequantize", {"rows": whole["nf4_dequantize"]["rows"] + 1}, "codes"
    for size in (2048, 4096):  # the weight is in one such block
        yield "nf4_dequantize", {"block_size": size, "absmax": np.ones(2, np.float32)}, rf"\b{size}\b.*absmax"
    scales = np.ones(4, np.float32)
    yield from (("nf4_double_dequantize", {"scales": scales[:count]}, "scales") for count in (1, 2, 4))
    for operation, name in (("pool", "mask"), ("attention", "mask"), ("lm_cross_entropy", "mask"), ("rope", "positions")):
        value = whole[operation][name]
        yield from ((operation, {name: each}, name) for each in (value[:, :1], value[:1], value[0]))
    for operation, name in (("lm_cross_entropy", "input_ids"), ("attention", "k"), ("attention", "v")):
        yield operation, {name: whole[operation][name][:1]}, name


def _of_steps(rng: Generator, whole: dict[str, dict[str, Any]]) -> Iterator[Bad]:
    counts, gradients = (whole["average_gradients"][name] for name in ("counts", "gradients"))
    yield from (_with("average_gradients", "counts", rng, counts, value) for value in (0, -1))
    yield from (("average_gradients", {"counts": each}, "counts") for each in (counts[:1], counts[:, None]))
    for name in ("gradient", "exp_avg", "exp_avg_sq"):
        value = whole["adamw_step"][name]
        yield from (("adamw_step", {name: each}, name) for each in (value[:1], np.stack([value] * 2)))
    yield "average_gradients", {"gradients": gradients[:0], "counts": counts[:0]}, "counts"
    yield from (("clip_by_global_norm", {"max_norm": value}, "max_norm") for value in (0.0, -1.0, np.nan))
    yield "clip_by_global_norm", {"gradients": np.full_like(gradients, 1e30)}, "norm is inf: the sum of squares overflows"
    yield from (_with("clip_by_global_norm", "gradients", rng, gradients, value) for value in (np.nan, np.inf, -np.inf))
    yield from (("adamw_step", {"step": step}, "step") for step in (0, -1))
    yield from (("learning_rate_schedule", {"warmup_fraction": value}, "warmup_fraction") for value in (-0.125, 1.125, np.nan))
    yield from (("learning_rate_schedule", {"kind": kind}, "schedule") for kind in ("step", ""))


def _of_many(whole: dict[str, dict[str, Any]]) -> Iterator[Bad]:
    """Many rows, of which the last has a bad number, which is named by its own place, in whatever parts they are looked at."""
    vocab = whole["lm_cross_entropy"]["logits"].shape[-1]
    for operation, name, beside, value in (
        *((operation, "logits", ("labels",), np.nan) for operation in ("weighted_cross_entropy", "cross_entropy_per_sample")),
        ("weighted_cross_entropy", "labels", ("logits",), -1),
        *(("bce_with_logits", *each) for each in (("logits", ("targets",), np.inf), ("targets", ("logits",), 2.0))),
        *(("lm_cross_entropy", *each) for each in (("logits", ("input_ids", "mask"), np.nan), ("input_ids", ("logits", "mask"), vocab))),
        ("embedding", "input_ids", (), -1),
        ("average_gradients", "counts", ("gradients",), 0),
        ("clip_by_global_norm", "gradients", (), np.nan),
    ):
        given = whole[operation]
        times = (MANY_LOGITS if given[name].ndim == 3 else MANY) // given[name].size + 1
        many = {each: np.concatenate([given[each]] * times) for each in (name, *beside)}
        bad = many[name].copy()
        bad.flat[-1] = value
        yield operation, many | {name: bad}, _named(name, many[name], bad)
    mask = np.ones((MANY, whole["pool"]["mask"].shape[1]), bool)
    mask[-1] = False
    yield "pool", {"mask": mask, "x": np.zeros((*mask.shape, 1), np.float32)}, rf"mask\[{MANY - 1}\]"


def _normal(rng: Generator, *shape: int) -> Any:
    return rng.normal(size=shape).astype(np.float32)


def _with(operation: str, name: str, rng: Generator, value: Any, bad: Any, rest: str = "") -> Bad:
    """The array with that for one of its elements, of which the refusal names the place and the number."""
    found = value.copy()
    found.flat[int(rng.integers(value.size))] = bad
    return operation, {name: found}, _named(name, value, found) + rest


def _named(name: str, whole: Any, bad: Any) -> str:
    """The first element that differs, by place and number."""
    place = tuple(np.argwhere(bad != whole)[0].tolist())
    return rf"{name}\[{', '.join(map(str, place))}\] is {re.escape(str(bad[place].item()))}\b"
