"""Pre-training runs: how they end, resume and stop; validation, checkpoints, and the hash of the optimiser's state."""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric.comparison import (
    Comparison,
    Errors,
    broken,
    compare,
    value_at_least,
    value_at_most,
    value_inside,
    value_within,
)
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.doors.files import Tokens
from blackswan.falsifiers.subjects.doors.training import Pretraining, PretrainingRecord
from blackswan.falsifiers.system.adapter_files import generated
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.token_streams import pieces_of, write_shards
from blackswan.falsifiers.system.trial import Trial, may_be_non_finite
from blackswan.reference.decoder import parameter_shapes
from blackswan.reference.optimiser import learning_rate_schedule
from blackswan.reference.table import Array, Arrays

if TYPE_CHECKING:
    from blackswan.falsifiers.subjects.impl.pretrainer import TrainedDecoder

END = 1  # <eos> of the shipped tokenizer
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", CHECKPOINT / "tokenizer.json"
VOCAB = 24
SIZES = {"vocab": VOCAB, "hidden": 16, "intermediate": 24, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "max_positions": 64}
HELD_OUT = 40
"""Tokens on which a small run validates."""
EPS = 1e-8
HUGE = 1e37
"""A gain of this size leaves the loss finite, and not the gradient."""


def _architecture(rng: Generator) -> dict[str, Any]:
    family = str(rng.choice(["llama", "qwen2", "qwen3"]))
    return {**SIZES, "family": family, "eps": 1e-6, "theta": 10000.0, "tied": bool(rng.integers(2))}


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def small_pretraining(trial: Trial, epochs: int, **settings: Any) -> Iterator[tuple[Pretraining, int]]:
    """A run on a small random stream, and its number of tokens; rows and batches that end unevenly."""
    rng = trial.rng("run")
    count = int(rng.integers(60, 120))
    with _folder() as folder:
        shards = [write_shards(folder / str(size), pieces_of(rng.integers(0, VOCAB, size), rng)) for size in (count, HELD_OUT)]
        batch, seq, seed = int(rng.integers(2, 5)), int(rng.integers(6, 12)), int(rng.integers(1000))
        train, validation = Tokens(shards[0], VOCAB, batch, seq, seed), Tokens(shards[1], VOCAB, batch, seq)
        given = {"epochs": epochs, "micro_batch": 2, "learning_rate": 1e-2, **settings}
        yield Pretraining(_architecture(rng), seed, train, validation, folder / "output", TOKENIZER, given), count


def exhausted_stream_ends_the_epoch(trial: Trial) -> list[Comparison]:
    """Each epoch has the steps and tokens that follow from the stream's length, and is validated; the rates are the schedule's.

    Of training and of held-out tokens no more rows than a micro-batch are computed at a time, and no fewer.
    """
    epochs, rng = 3, trial.rng("schedule")
    schedule: dict[str, Any] = {"schedule": str(rng.choice(["linear", "cosine"])), "warmup_fraction": float(rng.choice([0.1, 0.3]))}
    micro = int(rng.integers(1, 4))
    with small_pretraining(trial, epochs, micro_batch=micro, **schedule) as (problem, count):
        record = trial.pretrainer.run(problem)
    rows = -(-(count - 1) // (problem.train.seq - 1))
    steps = -(-rows // problem.train.batch)
    found = same("epoch of each step", [epoch for epoch in range(epochs) for _ in range(steps)], [step.epoch for step in record.steps])
    if not found[0].held:
        return found
    tokens = np.reshape([step.tokens for step in record.steps], (epochs, steps)).sum(axis=1)
    expected = learning_rate_schedule(epochs * steps, problem.settings["learning_rate"], schedule["warmup_fraction"], schedule["schedule"])
    rates = np.array([step.learning_rate for step in record.steps])
    return [
        *found,
        compare("rates", expected, rates, Errors.flat(1e-15), UNIT_ROUNDOFF["float32"]),
        *same("number of each step", [*range(1, epochs * steps + 1)], [step.step for step in record.steps]),
        *same("tokens predicted in each epoch", np.full(epochs, count - 1), tokens),
        *same("epochs validated", epochs, len(record.validation)),
        *same(
            "rows computed at a time",
            [*_passes(problem.train, count, micro), *_passes(problem.train, HELD_OUT, micro)] * epochs,
            record.rows,
        ),
    ]


def _passes(tokens: Tokens, count: int, micro: int) -> Iterator[int]:
    """The rows of each micro-batch of an epoch of so many tokens."""
    rows = -(-(count - 1) // (tokens.seq - 1))
    for first in range(0, rows, tokens.batch):
        batch = min(tokens.batch, rows - first)
        yield from (min(micro, batch - start) for start in range(0, batch, micro))


def gradient_norms_are_real(trial: Trial) -> list[Comparison]:
    """Each norm is finite and ≥ 0, with clipping and without, and at the first step the same: it is taken before clipping."""
    firsts, found = [], []
    for clip in (0.1, 1e6, None):
        with small_pretraining(trial, 1, gradient_clip_norm=clip) as (problem, _):
            steps = trial.pretrainer.run(problem).steps
        firsts.append(steps[0].gradient_norm)
        found += [value_inside(f"norm at step {step.step} with clipping at {clip}", step.gradient_norm, 0.0, 1e9) for step in steps]
    return found + same("norm at step 1, by limit", [firsts[0]] * len(firsts), firsts)


def interrupted_run_goes_on(trial: Trial) -> list[Comparison]:
    """A run that is killed after a step and resumed makes the later steps, parameters and hash of one that was not, bit for bit.

    It is killed before its state was saved for the first time, after, after a state at the last step of an epoch, which has not ended, and
    after the last step; while a checkpoint is written, and while a state is. It leaves the same checkpoints, and no other file.
    """
    rng, found = trial.rng("kill"), list[Comparison]()
    with small_pretraining(trial, 2) as (problem, _):
        whole = trial.pretrainer.run(problem)
        last = len(whole.steps)
        epoch = last // 2
        every = next((number for number in (2, 3) if epoch % number), 2)  # states of the second epoch do not count from its beginning
        kills: list[tuple[int, int | None, int | None]] = [
            (1, None, None),
            (int(rng.integers(epoch + 1, last + 1)), every, None),
            (epoch, epoch, None),
            (last, None, None),
        ]
        kills += [(last, None, flush) for flush in _flushes(whole.flushes, rng)]
        for kill, interval, flush in kills:
            when = f"killed after {kill} of {last}" if flush is None else f"killed at {whole.flushes[flush]}, its write {flush}"
            settings = {**problem.settings, "save_every": interval}
            killed = replace(problem, output=problem.output.with_name(str(len(found))), settings=settings)
            before = trial.pretrainer.run(killed, stop_after=None if flush else kill, stop_at=flush)
            rest = trial.pretrainer.run(killed, resume=True)
            done = last - len(rest.steps)
            saved = {0, *range(0, kill + 1, interval or last + 1), *range(0, kill, epoch)}  # after these steps
            if flush is None:
                found += same(f"steps that are not made again, {when}", max(saved), done)
                found += same(f"states written, {when}", 1 + kill // (interval or last + 1) + (kill - 1) // epoch, _states(before))
            found += [
                *same(f"later steps, {when}", whole.steps[max(done, 0) :], rest.steps),
                *same(f"at the end, {when}", whole.parameters, rest.parameters),
                *same(f"hash of the state, {when}", whole.state_hash, rest.state_hash),
                *same(f"files, {when}", *(_left(each.output) for each in (problem, killed))),
            ]
    return found


def _flushes(names: Sequence[str], rng: Generator) -> list[int]:
    """One of a checkpoint's files, and one of a state's, which is not the first state."""
    first = next(place for place, name in enumerate(names) if "checkpoints" in name)
    later = list(enumerate(names))[first:]
    parts = ([place for place, name in later if ("checkpoints" in name) == checkpoint] for checkpoint in (True, False))
    return [int(rng.choice(places)) for places in parts]


def _states(record: PretrainingRecord) -> int:
    return sum(name.endswith("state.json") for name in record.flushes)


def _left(output: Path) -> dict[str, bytes]:
    """The files of a run but its settings, which say how often the state is saved, by their names."""
    return {name: value for name, value in content(output).items() if name != "state/state.json"}


def command_runs_alike(trial: Trial) -> list[Comparison]:
    """The command's last checkpoint is the library's, bit for bit, from random weights of the shipped checkpoint's architecture; resumed
    after its end it is as it was, and not resumed it is refused. From the checkpoint's weights a rate of 10⁻⁹ leaves it where it began.
    """
    config = json.loads((CHECKPOINT / CONFIG).read_text())
    sizes = {"vocab": "vocab_size", "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers"}
    sizes |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "max_positions": "max_position_embeddings"}
    architecture = {name: config[key] for name, key in sizes.items()} | {"family": config["model_type"], "eps": config["rms_norm_eps"]}
    architecture |= {"head_dim": architecture["hidden"] // architecture["heads"], "tied": True, "theta": 10000.0}
    rng = trial.rng("settings")
    drawn: dict[str, Any] = {
        "warmup_fraction": float(rng.choice([0.1, 0.4])),
        "schedule": str(rng.choice(["linear", "constant"])),
        "weight_decay": 0.3,
    }
    with small_pretraining(trial, 2, gradient_clip_norm=0.2, save_every=2, **drawn) as (problem, _):
        tokens, held_out = (replace(each, vocab=architecture["vocab"]) for each in (problem.train, problem.validation) if each)
        problem = replace(problem, architecture=architecture, train=tokens, validation=held_out)
        expected = trial.pretrainer.run(problem).parameters
        again = replace(problem, output=problem.output.with_name("by the command"))
        found = same("from random weights", expected, trial.pretrainer.command(CHECKPOINT, again, "--random"))
        found += same("resumed at its end", expected, trial.pretrainer.command(CHECKPOINT, again, "--random", "--resume"))
        found.append(
            trial.refuses("once more", partial(trial.pretrainer.command, CHECKPOINT, again, "--random"), "resume", "FileExistsError")
        )
        slow = replace(problem, output=problem.output.with_name("slow"), settings={**problem.settings, "learning_rate": 1e-9, "epochs": 1})
        kept, stored = trial.pretrainer.command(CHECKPOINT, slow), load_file(CHECKPOINT / WEIGHTS)
        moved = max(float(np.abs(kept[name] - value).max()) for name, value in stored.items())
    return [*found, value_at_most("largest change from the checkpoint's weights", moved, 1e-6)]


def run_has_its_own_settings(trial: Trial) -> list[Comparison]:
    """A step clipped to a norm far below AdamW's ε moves nothing but by decay: θ' − θ = −lr λ θ for matrices, 0 for vectors.

    By Adam alone an element moves at most lr · norm / ε.
    """
    rate, decay, share = 1e-2, 0.5, 1e-5
    with small_pretraining(trial, 1, warmup_fraction=0.0, weight_decay=decay, gradient_clip_norm=share * EPS) as (problem, _):
        start = trial.pretrainer.random(problem.architecture, problem.seed).parameters()
        moved = trial.pretrainer.run(problem, stop_after=1).parameters
    found = []
    for name, value in start.items():
        theta = np.asarray(value, np.float64)
        expected = -rate * decay * theta if theta.ndim > 1 else np.zeros_like(theta)
        limit = share * rate + 8 * UNIT_ROUNDOFF["float32"] * float(np.abs(theta).max())
        found.append(compare(name, expected, moved[name] - theta, Errors.flat(limit), UNIT_ROUNDOFF["float32"]))
    return found


@may_be_non_finite("*.validation.*")
def loss_falls(trial: Trial) -> list[Comparison]:
    """On a stream in which each token has one successor, the mean loss of the last five of thirty steps is a fifth below the first."""
    rng = trial.rng("learn")
    with _folder() as folder:
        stream = write_shards(folder / "train", [np.tile(rng.permutation(VOCAB), 40)])
        train = Tokens(stream, VOCAB, batch=4, seq=9, seed=int(rng.integers(1000)))
        settings = {"epochs": 1, "micro_batch": 4, "learning_rate": 1e-2}
        problem = Pretraining(_architecture(rng), trial.seed, train, None, folder / "output", TOKENIZER, settings)
        losses = [step.loss for step in trial.pretrainer.run(problem).steps]
    found = same("number of steps", 30, len(losses))
    return [*found, value_at_least("fall of the loss over the first", 1 - float(np.mean(losses[-5:])) / losses[0], 0.2)]


def _random_loss(trial: Trial, tokens: int) -> float:
    """The held-out loss of random weights on so many random tokens."""
    rng = trial.rng("random tokens")
    with _folder() as folder:
        stream = Tokens(write_shards(folder, [rng.integers(0, VOCAB, tokens)]), VOCAB, batch=8, seq=12)
        return trial.pretrainer.random(_architecture(rng), trial.seed).validate(stream, 4)


def random_weights_know_nothing(trial: Trial) -> list[Comparison]:
    """The loss of random weights on random tokens in [0.5, 1.5 ln V] of the original, and within a tenth of ln V; and the weights."""
    loss, middle = _random_loss(trial, 300), float(np.log(VOCAB))
    found = [value_inside("loss", loss, 0.5, 1.5 * middle), value_within("loss near ln V", loss, 0.9 * middle, 1.1 * middle)]
    return found + _as_families_begin(trial)


def _as_families_begin(trial: Trial) -> list[Comparison]:
    """Norms one, biases zero, and the elements of all matrices as n independent ones of N(0, 0.02²): their mean and their mean square are
    within seven standard deviations, 1/√n and √(2/n), of 0 and 1, and so is the mean product of two matrices' first elements of 0."""
    scalars = generated(trial.rng("random"), trial.seed, "float32", family=("qwen2", "qwen3", "llama")[trial.seed % 3]).scalars
    tensors = trial.pretrainer.random(scalars, trial.seed).parameters()
    matrices = [value.ravel().astype(np.float64) / 0.02 for value in tensors.values() if value.ndim == 2]
    drawn, count = np.concatenate(matrices), min(map(len, matrices))
    alike = np.stack([each[:count] for each in matrices])
    products = np.abs(np.triu(alike @ alike.T / count, 1))
    plain = {name: value for name, value in tensors.items() if value.ndim == 1}
    bound = 7 / np.sqrt(len(drawn))
    return [
        *same("vectors", {name: np.full_like(value, not name.endswith(".bias")) for name, value in plain.items()}, plain),
        value_inside("mean of the matrices / 0.02", float(drawn.mean()), -bound, bound),
        value_inside("mean square of the matrices / 0.02²", float(np.square(drawn).mean()), 1 - np.sqrt(2) * bound, 1 + np.sqrt(2) * bound),
        value_inside("largest mean product of two matrices / 0.02²", float(products.max()), 0.0, 7 / np.sqrt(count)),
    ]


@may_be_non_finite("answer")
def nothing_to_average_is_nan(trial: Trial) -> list[Comparison]:
    """The validation loss of a stream that predicts nothing is NaN; that of one with two tokens is not."""
    return same("NaN of a stream of one token, of two", [True, False], [bool(np.isnan(_random_loss(trial, tokens))) for tokens in (1, 2)])


def validation_is_pure(trial: Trial, *, share: float) -> list[Comparison]:
    """The held-out loss of the shipped checkpoint is below share · ln V and the same again, and the parameters stay those of the file."""
    rng = trial.rng("validation")
    with _folder() as folder:
        stream, vocab = _heldout(int(rng.integers(5, 10)))
        shards = write_shards(folder, pieces_of(stream, rng))
        tokens, micro = Tokens(shards, vocab, int(rng.integers(1, 6)), int(rng.integers(24, 48))), int(rng.integers(1, 4))
        decoder = trial.pretrainer.load(CHECKPOINT)
        before = decoder.parameters()
        loss, again = decoder.validate(tokens, micro), decoder.validate(tokens, micro)
    stored = load_file(CHECKPOINT / WEIGHTS)
    return [
        value_at_most("held-out loss", loss, share * float(np.log(vocab))),
        *same("loss again", loss, again),
        *same("before validation", stored, before),
        *same("after validation", stored, decoder.parameters()),
    ]


def _heldout(scripts: int) -> tuple[Array, int]:
    """The tokens of held-out scripts, each ended by the end token, through the tokenizers library; and the vocabulary."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    lines = CORPUS_HELDOUT.read_text(encoding="utf-8").splitlines()[:scripts]
    return np.concatenate([[*tokenizer.encode(json.loads(line)["input"]).ids, END] for line in lines]), tokenizer.get_vocab_size()


def state_hash_tells_states_apart(trial: Trial) -> list[Comparison]:
    """The hash against SHA-256 over steps and moments; the same for the same state; another for every other."""
    rng, ask = trial.rng("state"), trial.pretrainer.state_hash
    architecture, made = _architecture(rng), int(rng.integers(1, 3))
    (steps, moments), again = (_trained(trial, architecture, made).moments() for _ in range(2))
    names = sorted(moments)
    chosen = [*rng.choice(names, 4, replace=False), next(name for name in names if name.startswith("exp_avg_sq/"))]
    base = ask(steps, moments)
    states = {"the same state": again, "one more step": (steps + 1, moments)}
    states |= {f"a flipped bit of {name}": (steps, {**moments, name: _flipped(moments[name], rng)}) for name in chosen}
    found = [value_at_most("SHA-256 of the state differs", int(base != _sha256(steps, moments)), 0)]
    for name, state in states.items():
        digest = ask(*state)
        found.append(value_at_most(f"SHA-256 of {name} differs", int(digest != _sha256(*state)), 0))
        found.append(value_at_most(f"wrongly told apart or not: {name}", int((digest == base) is (state is not again)), 0))
    return found


def _trained(trial: Trial, architecture: Mapping[str, Any], steps: int) -> "TrainedDecoder":
    decoder = trial.pretrainer.random(architecture, trial.seed)
    for number in range(steps):
        decoder.train(_ids(trial, number))
    return decoder


def _ids(trial: Trial, number: int) -> Array:
    return trial.rng(f"tokens {number}").integers(0, VOCAB, (3, 8))


def _flipped(value: Array, rng: Generator) -> Array:
    """A copy with one bit of one float32 changed."""
    bits = value.copy().view(np.uint32)
    bits.reshape(-1)[rng.integers(bits.size)] ^= np.uint32(1 << int(rng.integers(32)))
    return bits.view(np.float32)


def _sha256(steps: int, moments: Mapping[str, Array]) -> str:
    content = (name.encode() + b"\0" + moments[name].astype("<f4").tobytes() for name in sorted(moments))
    return hashlib.sha256(steps.to_bytes(8, "little") + b"".join(content)).hexdigest()


@may_be_non_finite("answer.*")
def non_finite_stops_the_run(trial: Trial) -> list[Comparison]:
    """NaN, an infinity or a huge value in a parameter: a FloatingPointError that names step and place, and nothing has changed."""
    rng = trial.rng("non-finite")
    architecture, made = _architecture(rng), int(rng.integers(0, 3))
    shapes = parameter_shapes(architecture)
    inner = [name for name in shapes if ".layers." in name]  # a row of the embedding is used only where its token occurs
    found = []
    for value in (np.nan, np.inf, -np.inf, HUGE):
        name = "model.norm.weight" if value == HUGE else str(rng.choice(inner))
        decoder = _trained(trial, architecture, made)
        decoder.overwrite(name, int(rng.integers(np.prod(shapes[name]))), float(value))
        before = {**decoder.parameters(), **_state(decoder)}
        where = r"(\(\w+\)|norm)" if value == HUGE else re.escape(name)
        step = partial(decoder.train, _ids(trial, made))
        found.append(trial.refuses(f"{value} in {name}", step, f"step {made + 1}.*{where}", "FloatingPointError"))
        found += same(f"after {value} in {name}", before, {**decoder.parameters(), **_state(decoder)})
    return found


def _state(decoder: "TrainedDecoder") -> Arrays:
    steps, moments = decoder.moments()
    return {**moments, "steps": np.asarray(steps)}


def checkpoint_is_usable(trial: Trial) -> list[Comparison]:
    """Weights in the file and through the loader equal those in memory bit for bit; architecture and tokenizer beside them."""
    rng = trial.rng("checkpoint")
    architecture, step = _architecture(rng), int(rng.integers(1, 10**6))
    with _folder() as parent:
        decoder = trial.pretrainer.random(architecture, trial.seed)
        folder = decoder.save(parent / "checkpoints", TOKENIZER, step)
        names = sorted(path.name for path in folder.iterdir())
        if names != [CONFIG, WEIGHTS, TOKENIZER.name]:
            return [broken("files", "not a whole checkpoint", f"{CONFIG}, {WEIGHTS}, {TOKENIZER.name}", ", ".join(names))]
        tokenizer, config = (folder / TOKENIZER.name).read_bytes(), json.loads((folder / CONFIG).read_text())
        stored, loaded = load_file(folder / WEIGHTS), trial.pretrainer.load(folder).parameters()
    return [
        value_at_most("tokenizers that differ from the one given", int(tokenizer != TOKENIZER.read_bytes()), 0),
        *same("hidden_size", architecture["hidden"], config["hidden_size"]),
        *same("in the file", decoder.parameters(), stored),
        *same("loaded", decoder.parameters(), loaded),
    ]


def refuses_checkpoint_without_tokenizer(trial: Trial) -> list[Comparison]:
    """No tokenizer to go with the weights; and a folder that exists, which stays as it is."""
    architecture = _architecture(trial.rng("checkpoint"))
    decoder, other = (trial.pretrainer.random(architecture, trial.seed + number) for number in (0, 1))
    with _folder() as parent:
        output = parent / "checkpoints"
        found = [trial.refuses("no tokenizer", lambda: decoder.save(output, parent / TOKENIZER.name, 3), TOKENIZER.name)]
        if output.exists():
            found.append(broken("no tokenizer", "something was written"))
        folder = decoder.save(output, TOKENIZER, 3)
        before = (folder / WEIGHTS).read_bytes()
        found.append(trial.refuses("the folder exists", lambda: other.save(output, TOKENIZER, 3), "exists"))
        if (folder / WEIGHTS).read_bytes() != before:
            found.append(broken("the folder exists", "it was changed"))
    return found


def refuses_to_start(trial: Trial) -> list[Comparison]:
    """An architecture without weights, weights without an architecture, an encoder, weights of another architecture, no such folder.

    And weights that a step cannot move, in half precision or NF4."""
    with _folder() as parent:
        other, encoder, nowhere = parent / "other", parent / "encoder", parent / "nowhere"
        for folder, change in ((other, {"rms_norm_eps": 1e-5}), (encoder, {"model_type": "bert"})):
            shutil.copytree(CHECKPOINT, folder)
            config = json.loads((folder / CONFIG).read_text())
            (folder / CONFIG).write_text(json.dumps(config | change))
        starts: dict[str, tuple[Path | None, Path | None, str]] = {
            "architecture without weights": (CHECKPOINT, None, "weights"),
            "weights without architecture": (None, CHECKPOINT, "architecture"),
            "encoder": (encoder, encoder, "encoder"),
            "encoder's architecture, decoder's weights": (encoder, CHECKPOINT, "encoder"),
            "weights of another architecture": (other, CHECKPOINT, "eps"),
            "no such architecture": (nowhere, CHECKPOINT, "nowhere"),
            "no such weights": (CHECKPOINT, nowhere, "nowhere"),
        }
        found = [trial.refuses(name, partial(trial.pretrainer.initial, *given), message) for name, (*given, message) in starts.items()]
    for dtype, nf4, message in (("bfloat16", False, "float32"), ("float16", False, "float32"), ("float32", True, "NF4")):
        step = partial(trial.pretrainer.load(CHECKPOINT, dtype, nf4).train, _ids(trial, 0))
        found.append(trial.refuses(f"a step on {dtype}{' in NF4' * nf4}", step, message, "ValueError"))
    both = trial.pretrainer.initial(CHECKPOINT, CHECKPOINT)
    return [*found, *same("given both", load_file(CHECKPOINT / WEIGHTS), both.parameters()), *_starts_in_float32(trial)]


def _starts_in_float32(trial: Trial) -> list[Comparison]:
    """Of weights in any dtype a run trains parameters in float32, which are the same numbers."""
    model = generated(trial.rng("stored"), trial.seed, ("bfloat16", "float16")[trial.seed % 2])
    with _folder() as parent:
        start = model.write_checkpoint(parent / "model")
        found = trial.pretrainer.initial(start, start).parameters()
    expected = {name: np.asarray(value, np.float32) for name, value in model.decoder.items()}
    dtypes = same("dtypes of parameters", ["float32"], sorted({value.dtype.name for value in found.values()}))
    return [*dtypes, *same("parameters of stored weights", expected, found)]


def default_architecture_is_370m(trial: Trial) -> list[Comparison]:
    """The number of parameters, counted from the sizes here, in [366, 374] million, and as the subject counts it; Llama 2's ε and θ."""
    sizes, counted = trial.pretrainer.default_architecture()
    count = sum(int(np.prod(shape)) for shape in parameter_shapes(sizes).values())
    return [
        value_within("parameters", float(count), 366e6, 374e6),
        *same("parameters counted", count, counted),
        *same("family, ε and θ", ("llama", 1e-5, 1e4), tuple(sizes[name] for name in ("family", "eps", "theta"))),
    ]
