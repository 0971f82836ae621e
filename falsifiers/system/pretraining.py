"""Pre-training runs: how they end, resume and stop; validation, checkpoints, and the hash of the optimiser's state."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.refusals import refusal
from blackswan.falsifiers.numeric.comparison import (
    Comparison,
    Errors,
    broken,
    compare,
    compare_exactly,
    value_at_least,
    value_at_most,
    value_inside,
    value_within,
)
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.system.token_streams import pieces_of, write_shards
from blackswan.reference.decoder import parameter_shapes
from blackswan.reference.table import Array

END = 1  # <eos> of the shipped tokenizer
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
SIZES = {"vocab": 24, "hidden": 16, "intermediate": 24, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "max_positions": 64}
PREFIX = "parameters/"
EPS = 1e-8
STANDSTILL = 1e-30
"""A learning rate by which float32 moves nothing but zeros."""
HUGE = 1e37
"""A gain of this size leaves the loss finite, and not the gradient."""


def _architecture(rng: Generator) -> dict[str, Any]:
    family = str(rng.choice(["llama", "qwen2", "qwen3"]))
    return {**SIZES, "family": family, "eps": 1e-6, "theta": 10000.0, "tied": bool(rng.integers(2))}


@contextmanager
def _run(case: Case, epochs: int, **settings: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """The scalars of a run on a small random stream, and its number of tokens; rows and batches that end unevenly."""
    rng = generator_for(case.seed, "run")
    tokens = int(rng.integers(60, 120))
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        for name, count in (("train", tokens), ("validation", 40)):
            write_shards(folder / name, pieces_of(rng.integers(0, SIZES["vocab"], count), rng))
        yield (
            {
                "architecture": _architecture(rng),
                "path": str(folder / "train"),
                "validation": str(folder / "validation"),
                "output": str(folder / "output"),
                "tokenizer": str(CHECKPOINT / TOKENIZER),
                "vocab": SIZES["vocab"],
                "batch": int(rng.integers(2, 5)),
                "seq": int(rng.integers(6, 12)),
                "seed": int(rng.integers(1000)),
                "settings": {"epochs": epochs, "micro_batch": 2, "learning_rate": 1e-2, **settings},
            },
            tokens,
        )


def exhausted_stream_ends_the_epoch(attack: Attack, case: Case) -> list[Comparison]:
    """Steps and tokens of each epoch against the count from the stream's length; every loss near what random weights can give."""
    epochs = 3
    with _run(case, epochs) as (scalars, tokens):
        answer = attack.answer(case, scalars=scalars)
    rows = -(-(tokens - 1) // (scalars["seq"] - 1))
    steps = -(-rows // scalars["batch"])
    found = [compare_exactly("epoch of each step", np.repeat(np.arange(epochs), steps), answer["epoch"])]
    if not found[0].held:
        return found
    found.append(compare_exactly("number of each step", np.arange(1, epochs * steps + 1), answer["step"]))
    per_epoch = answer["tokens"].reshape(epochs, steps).sum(axis=1)
    found.append(compare_exactly("tokens predicted in each epoch", np.full(epochs, tokens - 1), per_epoch))
    found.append(compare_exactly("epochs validated", np.full(epochs, True), np.isfinite(answer["validation"])))
    return found


def gradient_norms_are_real(attack: Attack, case: Case) -> list[Comparison]:
    """Each norm finite and ≥ 0, with clipping and without; the same at the first step, for the norm is taken before clipping."""
    firsts, found = [], []
    for clip in (0.1, 1e6, None):
        with _run(case, 1, gradient_clip_norm=clip) as (scalars, _):
            norms = attack.answer(case, scalars=scalars)["gradient_norm"]
        firsts.append(norms[0])
        found += [value_inside(f"norm at step {step} with clipping at {clip}", float(norm), 0.0, 1e9) for step, norm in enumerate(norms, 1)]
    return [*found, *(compare_exactly("norm at step 1", firsts[0], first) for first in firsts[1:])]


def interrupted_run_goes_on(attack: Attack, case: Case) -> list[Comparison]:
    """A run killed after a step and resumed against one that was not: every later step, every parameter and the hash, bit for bit."""
    with _run(case, 2, save_every=int(generator_for(case.seed, "save").integers(1, 4))) as (scalars, _):
        whole = attack.answer(case, scalars=scalars)
        last = len(whole["step"])
        stop = int(generator_for(case.seed, "stop").integers(1, last))
        part = {**scalars, "output": scalars["output"] + "-killed"}
        attack.answer(case, scalars={**part, "stop_after": stop})
        rest = attack.answer(case, scalars={**part, "resume": True})
    done = last - len(rest["step"])
    found = [value_inside(f"steps that are not made again, killed after {stop}", float(done), 0.0, float(stop))]
    for name in ("step", "epoch", "loss", "gradient_norm", "tokens", "learning_rate"):
        found.append(compare_exactly(name, whole[name][max(done, 0) :], rest[name]))
    names = [name for name in whole if name.startswith(PREFIX)]
    return found + [compare_exactly(name, whole[name], rest[name]) for name in (*names, "state_hash")]


def run_has_its_own_settings(attack: Attack, case: Case) -> list[Comparison]:
    """A step clipped to a norm far below AdamW's ε moves nothing but by decay: θ' − θ = −lr λ θ for matrices, 0 for vectors.

    By Adam alone an element moves at most lr · norm / ε. The parameters before it are those of a run that stands still.
    """
    rate, decay, share = 1e-2, 0.5, 1e-5
    settings = {"warmup_fraction": 0.0, "weight_decay": decay, "gradient_clip_norm": share * EPS}
    with _run(case, 1, **settings) as (scalars, _):
        moved = attack.answer(case, scalars={**scalars, "stop_after": 1})
        still = {**scalars["settings"], "learning_rate": STANDSTILL}
        start = attack.answer(case, scalars={**scalars, "settings": still, "output": scalars["output"] + "-still", "stop_after": 1})
    found = []
    for name in (name for name in start if name.startswith(PREFIX)):
        theta = np.asarray(start[name], np.float64)
        expected = -rate * decay * theta if theta.ndim > 1 else np.zeros_like(theta)
        limit = share * rate + 8 * UNIT_ROUNDOFF["float32"] * float(np.abs(theta).max())
        difference = np.asarray(moved[name], np.float64) - theta
        found.append(compare(name, expected, difference, Errors.flat(limit), UNIT_ROUNDOFF["float32"]))
    return found


def loss_falls(attack: Attack, case: Case) -> list[Comparison]:
    """On a stream in which each token has one successor, the mean loss of the last five of thirty steps is a fifth below the first."""
    rng = generator_for(case.seed, "learn")
    with tempfile.TemporaryDirectory() as parent:
        folder = write_shards(Path(parent) / "train", [np.tile(rng.permutation(SIZES["vocab"]), 40)])
        answer = attack.answer(
            case,
            scalars={
                "architecture": _architecture(rng),
                "path": str(folder),
                "output": str(Path(parent) / "output"),
                "tokenizer": str(CHECKPOINT / TOKENIZER),
                "vocab": SIZES["vocab"],
                "batch": 4,
                "seq": 9,
                "seed": int(rng.integers(1000)),
                "settings": {"epochs": 1, "micro_batch": 4, "learning_rate": 1e-2},
            },
        )
    losses = answer["loss"]
    found = [compare_exactly("number of steps", np.asarray(30), np.asarray(len(losses)))]
    return [*found, value_at_least("fall of the loss over the first", float(1 - losses[-5:].mean() / losses[0]), 0.2)]


def random_weights_know_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """The loss of random weights on random tokens in [0.5, 1.5 ln V] of the ancestor, and within a tenth of ln V."""
    rng = generator_for(case.seed, "initial")
    with tempfile.TemporaryDirectory() as parent:
        folder = write_shards(Path(parent) / "tokens", [rng.integers(0, SIZES["vocab"], 300)])
        stream = {"path": str(folder), "vocab": SIZES["vocab"], "batch": 8, "seq": 12, "micro_batch": 4}
        loss = float(attack.answer(case, scalars={**stream, "architecture": _architecture(rng), "seed": case.seed})["loss"])
    middle = float(np.log(SIZES["vocab"]))
    return [value_inside("loss", loss, 0.5, 1.5 * middle), value_within("loss near ln V", loss, 0.9 * middle, 1.1 * middle)]


def validation_is_pure(attack: Attack, case: Case) -> list[Comparison]:
    """On the shipped checkpoint and held-out text: loss < share · ln V, the same again, parameters bit for bit as in the file."""
    rng = generator_for(case.seed, "validation")
    with tempfile.TemporaryDirectory() as parent:
        stream, vocab = _heldout(int(rng.integers(300, 600)))
        folder = write_shards(Path(parent) / "tokens", pieces_of(stream, rng))
        sizes = {"batch": int(rng.integers(1, 6)), "seq": int(rng.integers(24, 48)), "micro_batch": int(rng.integers(1, 4))}
        answer = attack.answer(case, scalars={"path": str(folder), "vocab": vocab, "checkpoint": str(CHECKPOINT), **sizes})
    stored = load_file(CHECKPOINT / WEIGHTS)
    bound = float(attack.claim.arguments["share"]) * float(np.log(vocab))
    found = [value_at_most("held-out loss", float(answer["loss"]), bound), compare_exactly("loss again", answer["loss"], answer["again"])]
    return found + [
        compare_exactly(f"{name} {when} validation", value, answer[f"{prefix}{name}"])
        for name, value in stored.items()
        for when, prefix in (("before", PREFIX), ("after", f"after/{PREFIX}"))
    ]


def _heldout(count: int) -> tuple[Array, int]:
    """The first tokens of the held-out scripts, each ended by the end token, through the tokenizers library; and the vocabulary."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(CHECKPOINT / TOKENIZER))
    ids: list[int] = []
    for line in CORPUS_HELDOUT.read_text(encoding="utf-8").splitlines():
        ids += [*tokenizer.encode(json.loads(line)["input"]).ids, END]
        if len(ids) >= count:
            break
    return np.asarray(ids[:count]), tokenizer.get_vocab_size()


def nothing_to_average_is_nan(attack: Attack, case: Case) -> list[Comparison]:
    """The validation loss of a stream that predicts nothing is NaN; that of one with two tokens is not."""
    rng, found = generator_for(case.seed, "empty"), []
    for tokens in (1, 2):
        with tempfile.TemporaryDirectory() as parent:
            folder = write_shards(Path(parent) / "tokens", [rng.integers(0, SIZES["vocab"], tokens)])
            stream = {"path": str(folder), "vocab": SIZES["vocab"], "batch": 2, "seq": 8, "micro_batch": 2}
            answer = attack.answer(case, scalars={**stream, "architecture": _architecture(rng), "seed": case.seed})
        found.append(compare_exactly(f"NaN with {tokens} tokens", np.asarray(tokens < 2), np.isnan(answer["loss"])))
    return found


def decay_reaches_matrices_only(attack: Attack, case: Case) -> list[Comparison]:
    """One step with decay and without: θ'(λ) − θ'(0) = −lr λ θ for a matrix, within rounding; vectors bit for bit the same."""
    rate, decay = float(case.scalars["learning_rate"]), float(case.scalars["weight_decay"])
    with_decay, without = attack.answer(case), attack.answer(case, scalars={"weight_decay": 0.0})
    found = []
    for name in parameter_shapes(case.scalars):
        start, key = case.inputs[f"{PREFIX}{name}"], f"trainable/{name}"
        moved = np.asarray(with_decay[key], np.float64) - np.asarray(without[key], np.float64)
        if start.ndim == 1:
            found.append(compare_exactly(name, without[key], with_decay[key]))
        else:
            # Each of the two parameters carries the rounding of its products, of θ and of the step, which is at most the rate.
            limit = 8 * UNIT_ROUNDOFF[attack.dtype] * (float(np.abs(start).max()) + rate)
            found.append(compare(name, -rate * decay * start, moved, Errors.flat(limit), UNIT_ROUNDOFF[attack.dtype]))
    return found


def state_hash_tells_states_apart(attack: Attack, case: Case) -> list[Comparison]:
    """The hash against SHA-256 over the steps and moments that come with it; the same for the same state; another for every other."""
    rng = generator_for(case.seed, "state")
    scalars = {"architecture": _architecture(rng), "seed": int(rng.integers(1000)), "steps": int(rng.integers(1, 3))}
    base = attack.answer(case, scalars=scalars)
    found = [_hash_as_said("the state", base), compare_exactly("the same state", base["state_hash"], _hash(attack, case, scalars))]
    moments = sorted(name for name in base if name.startswith(("exp_avg/", "exp_avg_sq/")))
    chosen = [moments[int(i)] for i in rng.choice(len(moments), 4, replace=False)]
    flips: list[dict[str, Any]] = [{"more_steps": 1}]
    for name in [*chosen, next(name for name in moments if name.startswith("exp_avg_sq/"))]:
        flips.append({"flip": (name, int(rng.integers(base[name].size)), int(rng.integers(32)))})
    for flip in flips:
        answer = attack.answer(case, scalars={**scalars, **flip})
        same = bool(np.array_equal(answer["state_hash"], base["state_hash"]))
        found += [value_inside(f"the same hash after {flip}", float(same), 0.0, 0.0), _hash_as_said(str(flip), answer)]
    return found


def _hash(attack: Attack, case: Case, scalars: Mapping[str, Any]) -> Array:
    return attack.answer(case, scalars=scalars)["state_hash"]


def _hash_as_said(name: str, answer: Mapping[str, Array]) -> Comparison:
    digest = hashlib.sha256(int(answer["steps"]).to_bytes(8, "little"))
    for key in sorted(key for key in answer if key.startswith("exp_avg")):
        digest.update(key.encode() + b"\0" + answer[key].astype("<f4").tobytes())
    expected = np.frombuffer(digest.hexdigest().encode(), np.uint8)
    return compare_exactly(f"SHA-256 of {name}", expected, answer["state_hash"])


def checkpoint_is_usable(attack: Attack, case: Case) -> list[Comparison]:
    """Weights in the file and through the loader equal those in memory bit for bit; architecture and tokenizer beside them."""
    rng = generator_for(case.seed, "checkpoint")
    architecture, step = _architecture(rng), int(rng.integers(1, 10**6))
    with tempfile.TemporaryDirectory() as parent:
        source = {"architecture": architecture, "seed": case.seed, "tokenizer": str(CHECKPOINT / TOKENIZER)}
        saved = attack.answer(case, scalars={**source, "output": str(Path(parent) / "checkpoints"), "step": step})
        folder = Path(str(saved.pop("folder")))
        names = sorted(path.name for path in folder.iterdir())
        if names != [CONFIG, WEIGHTS, TOKENIZER]:
            return [broken("files", "not a whole checkpoint", f"{CONFIG}, {WEIGHTS}, {TOKENIZER}", ", ".join(names))]
        found = [_same_text("tokenizer", CHECKPOINT / TOKENIZER, folder / TOKENIZER)]
        stored = {f"{PREFIX}{name}": value for name, value in load_file(folder / WEIGHTS).items()}
        loaded = attack.answer(case, operation="load_checkpoint", scalars={"path": str(folder)})
        vocab = attack.answer(case, operation="load_tokenizer", scalars={"path": str(folder)})["vocab"]
        config = json.loads((folder / CONFIG).read_text())
    found.append(value_inside("the loader's tokenizer has a vocabulary", float(vocab), 1.0, np.inf))
    found.append(compare_exactly("hidden_size", np.asarray(architecture["hidden"]), np.asarray(config["hidden_size"])))
    for where, tensors in (("in the file", stored), ("loaded", loaded)):
        if set(tensors) != set(saved):
            found.append(broken(f"names {where}", "differ", None, ", ".join(sorted(set(tensors) ^ set(saved)))))
            continue
        found += [compare_exactly(f"{name} {where}", value, tensors[name]) for name, value in saved.items()]
    return found


def _same_text(name: str, one: Path, other: Path) -> Comparison:
    same = one.read_bytes() == other.read_bytes()
    return value_inside(f"{name} differs from the one given", float(not same), 0.0, 0.0)


def refuses_checkpoint_without_tokenizer(attack: Attack, case: Case) -> list[Comparison]:
    """No tokenizer to go with the weights; and a folder that exists, which stays as it is."""
    rng = generator_for(case.seed, "checkpoint")
    with tempfile.TemporaryDirectory() as parent:
        output = Path(parent) / "checkpoints"
        scalars = {"architecture": _architecture(rng), "seed": case.seed, "output": str(output), "step": 3}
        missing = {**scalars, "tokenizer": str(Path(parent) / TOKENIZER)}
        found = [_refused("no tokenizer", lambda: attack.answer(case, scalars=missing), TOKENIZER)]
        if output.exists():
            found.append(broken("no tokenizer", "something was written"))
        given = {**scalars, "tokenizer": str(CHECKPOINT / TOKENIZER)}
        folder = Path(str(attack.answer(case, scalars=given)["folder"]))
        before = (folder / WEIGHTS).read_bytes()
        found.append(_refused("the folder exists", lambda: attack.answer(case, scalars={**given, "seed": case.seed + 1}), "exists"))
        if (folder / WEIGHTS).read_bytes() != before:
            found.append(broken("the folder exists", "it was changed"))
    return found


def _refused(name: str, ask: Callable[[], object], message: str) -> Comparison:
    return replace(refusal(ask, "Exception", message), tensor=name)


def refuses_to_start(attack: Attack, case: Case) -> list[Comparison]:
    """An architecture without weights, weights without an architecture, an encoder, weights of another architecture, no such folder."""
    with tempfile.TemporaryDirectory() as parent:
        other, encoder = Path(parent) / "other", Path(parent) / "encoder"
        for folder, change in ((other, {"rms_norm_eps": 1e-5}), (encoder, {"model_type": "bert"})):
            shutil.copytree(CHECKPOINT, folder)
            config = json.loads((folder / CONFIG).read_text())
            (folder / CONFIG).write_text(json.dumps(config | change))
        shipped, nowhere = str(CHECKPOINT), str(Path(parent) / "nowhere")
        starts: dict[str, tuple[str | None, str | None, str]] = {
            "architecture without weights": (shipped, None, "weights"),
            "weights without architecture": (None, shipped, "architecture"),
            "encoder": (str(encoder), str(encoder), "encoder"),
            "encoder's architecture, decoder's weights": (str(encoder), shipped, "encoder"),
            "weights of another architecture": (str(other), shipped, "eps"),
            "no such architecture": (nowhere, shipped, "nowhere"),
            "no such weights": (shipped, nowhere, "nowhere"),
        }
        found = [
            _refused(name, partial(attack.answer, case, scalars={"architecture": architecture, "weights": weights}), message)
            for name, (architecture, weights, message) in starts.items()
        ]
        both = attack.answer(case, scalars={"architecture": shipped, "weights": shipped})
    return found + [
        compare_exactly(f"{PREFIX}{name}", value, both[f"{PREFIX}{name}"]) for name, value in load_file(CHECKPOINT / WEIGHTS).items()
    ]


def non_finite_stops_the_run(attack: Attack, case: Case) -> list[Comparison]:
    """NaN, an infinity or a huge value in a parameter: a FloatingPointError that names step and place, and nothing has changed."""
    rng = generator_for(case.seed, "non-finite")
    architecture, steps = _architecture(rng), int(rng.integers(0, 3))
    shapes = parameter_shapes(architecture)
    inner = [name for name in shapes if ".layers." in name]  # a row of the embedding is used only where its token occurs
    found = []
    for value in (np.nan, np.inf, -np.inf, HUGE):
        name = "model.norm.weight" if value == HUGE else str(rng.choice(inner))
        at = int(rng.integers(np.prod(shapes[name])))
        bad = {"architecture": architecture, "seed": case.seed, "steps": steps, "parameter": name, "at": at, "value": float(value)}
        where = r"(\(\w+\)|norm)" if value == HUGE else re.escape(name)
        asked = refusal(partial(attack.answer, case, scalars=bad), "FloatingPointError", f"step {steps + 1}.*{where}")
        found.append(replace(asked, tensor=f"{value} in {name}"))
    return found


def default_architecture_is_370m(attack: Attack, case: Case) -> list[Comparison]:
    """The number of parameters, counted from the sizes here, in [366, 374] million, and as the subject counts it."""
    answer = attack.answer(case)
    sizes = {name: answer[name].item() for name in (*SIZES, "family", "tied", "eps", "theta")}
    count = sum(int(np.prod(shape)) for shape in parameter_shapes(sizes).values())
    return [
        value_within("parameters", float(count), 366e6, 374e6),
        compare_exactly("parameters counted", np.asarray(count), answer["parameters"]),
        value_inside("family is llama", float(sizes["family"] == "llama"), 1.0, 1.0),
    ]
