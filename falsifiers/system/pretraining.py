"""Pre-training runs: their steps and records, how they end, resume and learn, and the command that makes them."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.comparison import (
    Comparison,
    Errors,
    compare,
    value_at_least,
    value_at_most,
    value_inside,
)
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.doors.files import Tokens
from blackswan.falsifiers.subjects.doors.training import Pretraining, PretrainingRecord
from blackswan.falsifiers.system.same import NO_LETTER, content, same
from blackswan.falsifiers.system.token_streams import pieces_of, write_shards
from blackswan.falsifiers.system.trial import Trial, may_be_non_finite
from blackswan.reference.optimiser import learning_rate_schedule

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", CHECKPOINT / "tokenizer.json"
VOCAB = 24
SIZES = {"vocab": VOCAB, "hidden": 16, "intermediate": 24, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "max_positions": 64}
LARGER = {"hidden": 128, "intermediate": 256, "layers": 12}
"""Sizes of a decoder beside whose state little is held but that; none of its tensors is much of it."""
BESIDE = 0.2
"""So much may a step take, in parameters and moments, beside its gradients, these in one vector, and the clipped ones."""
HELD_OUT = 40
"""Tokens on which a small run validates."""
EPS = 1e-8
ROWS = {2: 300, 2**15 + 1: 3}
"""Rows of a batch and their tokens: more tokens of a row than a byte counts, and more of a batch than 16 bits."""
BATCHES = 130
"""More held-out batches than somebody may think enough."""
STEEP = 0.5
"""A learning rate by which weights become large, and with them the norms of gradients, after a step."""
OTHER = "cuda:3"
"""A device that need not be there."""
STEPS = 8
"""Of the schedule by which a decoder is trained outside a run."""


def small_architecture(rng: Generator) -> dict[str, Any]:
    """A decoder of one of the three families, its embeddings tied or not."""
    family = str(rng.choice(["llama", "qwen2", "qwen3"]))
    return {**SIZES, "family": family, "eps": 1e-6, "theta": 10000.0, "tied": bool(rng.integers(2))}


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextmanager
def small_pretraining(trial: Trial, epochs: int, **settings: Any) -> Iterator[tuple[Pretraining, int]]:
    """A run on a small random stream, and its number of tokens; rows and batches that end unevenly."""
    rng = trial.rng("run")
    count = int(rng.integers(60, 120))
    with temporary_folder() as folder:
        shards = [write_shards(folder / str(size), pieces_of(rng.integers(0, VOCAB, size), rng)) for size in (count, HELD_OUT)]
        batch, seq, seed = int(rng.integers(2, 5)), int(rng.integers(6, 12)), int(rng.integers(2**40, 2**62))
        train, validation = Tokens(shards[0], VOCAB, batch, seq, seed), Tokens(shards[1], VOCAB, batch, seq)
        given = {"epochs": epochs, "micro_batch": 2, "learning_rate": 1e-2, **settings}
        yield Pretraining(small_architecture(rng), seed, train, validation, folder / "output", TOKENIZER, given), count


def exhausted_stream_ends_the_epoch(trial: Trial) -> list[Comparison]:
    """Each epoch has the steps and tokens that follow from the stream's length, and is validated; the rates are the schedule's.

    Rows are computed a micro-batch at a time, in training and in validation, and nothing is held of those before. All tokens of long
    rows, and of many, are counted.
    """
    epochs, rng = 3, trial.rng("schedule")
    schedule: dict[str, Any] = {"schedule": ["linear", "cosine"][trial.seed % 2], "warmup_fraction": float(rng.choice([0.1, 0.3]))}
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
            "rows computed at a time, and tensors held of earlier ones",
            [(size, 0) for size in (*_passes(problem.train, count, micro), *_passes(problem.train, HELD_OUT, micro))] * epochs,
            record.passes,
        ),
        *_many_tokens(trial),
        *_many_batches(trial),
        _step_in_little_memory(trial),
    ]


def _many_tokens(trial: Trial) -> Iterator[Comparison]:
    """A step of long rows, and one of many."""
    for batch, seq in ROWS.items():
        with small_pretraining(trial, 1, micro_batch=batch, warmup_fraction=0.0) as (problem, _), temporary_folder() as folder:
            stream = trial.rng("many tokens").integers(0, VOCAB, batch * (seq - 1) + 1)
            train = Tokens(write_shards(folder / "many", [stream]), VOCAB, batch, seq)
            record = trial.pretrainer.run(replace(problem, train=train))
        yield from same(f"tokens predicted in {batch} rows of {seq}", [len(stream) - 1], [step.tokens for step in record.steps])


def _many_batches(trial: Trial) -> list[Comparison]:
    """A validation of more batches than others have; and nothing is there of a decoder that was trained and let go of."""
    with small_pretraining(trial, 1, warmup_fraction=0.0) as (problem, count), temporary_folder() as folder:
        stream = trial.rng("many batches").integers(0, VOCAB, BATCHES + 1)
        held_out = Tokens(write_shards(folder / "many", [stream]), VOCAB, batch=1, seq=2)
        record = trial.pretrainer.run(replace(problem, validation=held_out))
        left = trial.pretrainer.left_of(replace(problem, output=folder / "let go"))
    trained = len([*_passes(problem.train, count, problem.settings["micro_batch"])])
    found = same("batches that are validated on", BATCHES, len(record.passes) - trained)
    return found + same("what outlives a decoder that was let go of", [], left)


def _passes(tokens: Tokens, count: int, micro: int) -> Iterator[int]:
    """The rows of each micro-batch of an epoch of so many tokens."""
    rows = -(-(count - 1) // (tokens.seq - 1))
    for first in range(0, rows, tokens.batch):
        batch = min(tokens.batch, rows - first)
        yield from (min(micro, batch - start) for start in range(0, batch, micro))


def gradient_norms_are_real(trial: Trial) -> Iterator[Comparison]:
    """Each norm is finite and ≥ 0, with clipping and without,
    and at the first step one but for the order of a sum: that before clipping."""
    firsts = []
    for clip in (0.1, 1e6, None):
        with small_pretraining(trial, 1, gradient_clip_norm=clip) as (problem, _):
            steps = trial.pretrainer.run(problem).steps
        firsts.append(steps[0].gradient_norm)
        yield from (value_inside(f"norm at step {step.step} with clipping at {clip}", step.gradient_norm, 0.0, 1e9) for step in steps)
    off = max(abs(first - firsts[0]) for first in firsts) / firsts[0]
    yield value_at_most("share by which norms at step 1 differ by limit", off, 16 * UNIT_ROUNDOFF["float32"])  # in whatever order


def interrupted_run_goes_on(trial: Trial) -> list[Comparison]:
    """A run that is killed after a step and resumed makes the later steps, parameters and hash of one that was not, bit for bit.

    It is killed before its state was saved for the first time, after, after a state at the last step of an epoch, which has not ended, and
    after the last step; while a checkpoint is written, and while a state is. It leaves the same checkpoints, and no other file. So it does
    where it is killed again after it went on.
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
            killed = replace(problem, output=problem.output.with_name(f"killed {len(found)} {NO_LETTER}"), settings=settings)
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
                *same(f"moments at which another process could write, {when}", [], [*before.free, *rest.free]),
                *same(f"files, {when}", *(_left(each.output) for each in (problem, killed))),
            ]
        found += _killed_twice(trial, problem, whole, every)
        found += _interrupted_while_it_moves(trial, problem, whole)
    return found + _killed_in_float64(trial) + _on_a_slow_disk(trial) + [_in_little_memory(trial)]


def _interrupted_while_it_moves(trial: Trial, problem: Pretraining, whole: PretrainingRecord) -> list[Comparison]:
    """Ctrl-C comes when a step has moved some of the parameters, and a state is one of whole steps all the same, if another is written."""
    settings, moved = {**problem.settings, "save_every": 1}, len(whole.parameters)
    ended = replace(problem, output=problem.output.with_name("interrupted"), settings=settings)
    trial.pretrainer.run(ended, interrupt_at=2 * moved + moved // 2)
    rest = trial.pretrainer.run(ended, resume=True)
    return [
        *same("later steps, interrupted in step 3", whole.steps[-len(rest.steps) :], rest.steps),
        *same("at the end, interrupted in step 3", (whole.parameters, whole.state_hash), (rest.parameters, rest.state_hash)),
    ]


def _killed_in_float64(trial: Trial) -> list[Comparison]:
    """A decoder in float64 goes on in all of its bits."""
    with small_pretraining(trial, 1, save_every=1) as (problem, _):
        run = partial(trial.pretrainer.run, dtype="float64")
        whole = run(replace(problem, output=problem.output.with_name("whole")))
        run(problem, stop_after=1)
        rest = run(problem, resume=True)
    return [
        *same("later steps in float64", whole.steps[1:], rest.steps),
        *same("at the end in float64", (whole.parameters, whole.state_hash), (rest.parameters, rest.state_hash)),
    ]


def _in_little_memory(trial: Trial) -> Comparison:
    """A state is read into the run's own parameters and moments, which take what its file does, and is not held beside them."""
    with small_pretraining(trial, 1) as (problem, _):
        problem = replace(problem, architecture={**problem.architecture, **LARGER})
        trial.pretrainer.run(problem, stop_after=1)
        held, size = trial.pretrainer.going_on(problem)
    return value_at_most("held beside a run that goes on, in states", max(0, held / size - 1), 0.25)


def _step_in_little_memory(trial: Trial) -> Comparison:
    """A step moves parameters one after another: beside what stays it holds no new ones of all of them, and no new moments."""
    architecture = {**small_architecture(trial.rng("step")), **LARGER}
    taken = trial.pretrainer.taken_by_a_step(architecture, trial.seed)
    return value_at_most("taken by a step beside its gradients, in parameters and moments", max(0.0, taken - 1), BESIDE)


def _on_a_slow_disk(trial: Trial) -> list[Comparison]:
    """A state is that of its own step, even if the next step is made before the state is hashed and written: it equals the state of a run
    that was killed after that step."""
    with small_pretraining(trial, 2, save_every=2) as (problem, _):
        problem = replace(problem, train=replace(problem.train, batch=2))  # of three steps an epoch at least
        other = replace(problem, output=problem.output.with_name("slow"))
        trial.pretrainer.run(problem, stop_after=2)
        trial.pretrainer.run(other, stop_after=3, slowly=True)
        states = [load_file(each.output / "state" / "state.safetensors") for each in (problem, other)]
        found = same("state on a slow disk", *states)
        if not all(each.held for each in found):
            return found
        rests = [trial.pretrainer.run(each, resume=True) for each in (problem, other)]
    return found + same("steps and hash after a state on a slow disk", *((rest.steps, rest.state_hash) for rest in rests))


def _killed_twice(trial: Trial, problem: Pretraining, whole: PretrainingRecord, every: int) -> list[Comparison]:
    """A run that went on and is killed again goes on from the last state, which counts the steps of the whole run, as it did before."""
    epoch, found = len(whole.steps) // 2, list[Comparison]()
    for before, interval, kill in ((None, every, (epoch // every + 1) * every), (1, 1, epoch + 2)):
        first, again = (
            replace(problem, output=problem.output.with_name(f"twice {interval}"), settings={**problem.settings, "save_every": each})
            for each in (before, interval)
        )
        trial.pretrainer.run(first, stop_after=epoch + 1)
        trial.pretrainer.run(again, resume=True, stop_after=kill)
        rest = trial.pretrainer.run(again, resume=True)
        when = f"killed after {epoch + 1}, and after {kill} with a state every {interval}"
        found += [*same(f"later steps, {when}", whole.steps[kill:], rest.steps), *same(f"hash, {when}", whole.state_hash, rest.state_hash)]
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


def command_runs_alike(trial: Trial) -> Iterator[Comparison]:
    """The command's last checkpoint is the library's, bit for bit, from random weights of the shipped checkpoint's architecture; resumed
    after its end it is as it was, and not resumed it is refused. From the checkpoint's weights a rate of 10⁻⁹ leaves it where it began.
    Both are made on the device that is named.
    """
    config = json.loads((CHECKPOINT / CONFIG).read_text())
    sizes = {"vocab": "vocab_size", "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers"}
    sizes |= {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "max_positions": "max_position_embeddings"}
    architecture = {name: config[key] for name, key in sizes.items()} | {"family": config["model_type"], "eps": config["rms_norm_eps"]}
    architecture |= {"head_dim": architecture["hidden"] // architecture["heads"], "tied": True, "theta": 10000.0}
    rng = trial.rng("settings")
    drawn: dict[str, Any] = {
        "warmup_fraction": float(rng.choice([0.1, 0.4])),
        "schedule": ["linear", "constant"][trial.seed % 2],
        "weight_decay": 0.3,
    }
    with small_pretraining(trial, 2, gradient_clip_norm=0.2, save_every=2, **drawn) as (problem, _):
        tokens, held_out = (replace(each, vocab=architecture["vocab"]) for each in (problem.train, problem.validation) if each)
        problem = replace(problem, architecture=architecture, train=tokens, validation=held_out)
        expected = trial.pretrainer.run(problem).parameters
        again = replace(problem, output=problem.output.with_name("by the command"))
        yield from same("from random weights", expected, trial.pretrainer.command(CHECKPOINT, again, "--random"))
        yield from same("resumed at its end", expected, trial.pretrainer.command(CHECKPOINT, again, "--random", "--resume"))
        yield trial.refuses("once more", partial(trial.pretrainer.command, CHECKPOINT, again, "--random"), "resume", "FileExistsError")
        for flags in ([], ["--random"]):
            found = trial.pretrainer.device_of_command(OTHER, CHECKPOINT, replace(problem, output=problem.output.with_name("none")), *flags)
            yield from same(f"devices of decoders on {OTHER}, {flags}", [OTHER], found)
        slow = replace(problem, output=problem.output.with_name("slow"), settings={**problem.settings, "learning_rate": 1e-9, "epochs": 1})
        kept, stored = trial.pretrainer.command(CHECKPOINT, slow), load_file(CHECKPOINT / WEIGHTS)
        moved = max(float(np.abs(kept[name] - value).max()) for name, value in stored.items())
    yield value_at_most("largest change from the checkpoint's weights", moved, 1e-6)


def run_has_its_own_settings(trial: Trial) -> list[Comparison]:
    """A step clipped to a norm far below AdamW's ε moves nothing but by decay: θ' − θ = −lr λ θ for matrices, 0 for vectors.

    By Adam alone an element moves at most lr · norm / ε.
    """
    rate, share, found = 1e-2, 1e-5, list[Comparison]()
    for decay in (0.5, 0.0):
        with small_pretraining(trial, 1, warmup_fraction=0.0, weight_decay=decay, gradient_clip_norm=share * EPS) as (problem, _):
            start = trial.pretrainer.random(problem.architecture, problem.seed).parameters()
            moved = trial.pretrainer.run(problem, stop_after=1).parameters
        for name, value in start.items():
            theta = np.asarray(value, np.float64)
            expected = -rate * decay * theta if theta.ndim > 1 else np.zeros_like(theta)
            limit = share * rate + 8 * UNIT_ROUNDOFF["float32"] * float(np.abs(theta).max())
            found.append(compare(f"{name}, decay {decay}", expected, moved[name] - theta, Errors.flat(limit), UNIT_ROUNDOFF["float32"]))
    return [*found, *_unlimited(trial), *_decays_without_gradients(trial)]


def _unlimited(trial: Trial) -> list[Comparison]:
    """Without a limit of the norm a run is, bit for bit, that of a limit which no norm meets; the norms are those of large weights."""
    runs = []
    for clip in (1e6, None):
        with small_pretraining(trial, 1, warmup_fraction=0.0, learning_rate=STEEP, gradient_clip_norm=clip) as (problem, _):
            record = trial.pretrainer.run(problem)
        runs.append({"parameters": record.parameters, "moments": record.state_hash})
    norm = max(step.gradient_norm for step in record.steps)
    return [value_at_least("largest norm without a limit", norm, 1.1), *same("a run without a limit of the norm", *runs)]


def _decays_without_gradients(trial: Trial) -> list[Comparison]:
    """Where the output of an attention is zero, as of a block that was added, nothing before it has a gradient; it decays like the rest."""
    rng, rates = trial.rng("no gradient"), learning_rate_schedule(STEPS, 1e-2, 0.06, "constant")
    architecture, layer = small_architecture(rng), "model.layers.0.self_attn."
    decoder = trial.pretrainer.random(architecture, trial.seed)
    for place in range(architecture["hidden"] * architecture["heads"] * architecture["head_dim"]):
        decoder.overwrite(f"{layer}o_proj.weight", place, 0.0)
    start = decoder.parameters()
    for _ in range(2):  # the rate of the first is 0
        decoder.train(rng.integers(0, VOCAB, (3, 8)))
    end, found = decoder.parameters(), []
    for name in (f"{layer}{part}_proj.weight" for part in "qkv"):
        theta = np.asarray(start[name], np.float64)
        limit, moved = 8 * UNIT_ROUNDOFF["float32"] * float(np.abs(theta).max()), end[name] - theta
        expected = theta * (np.prod(1 - 0.1 * rates[:2]) - 1)
        found.append(compare(f"{name} without a gradient", expected, moved, Errors.flat(limit), UNIT_ROUNDOFF["float32"]))
    return found


@may_be_non_finite("*.validation.*")
def loss_falls(trial: Trial) -> Iterator[Comparison]:
    """On a stream in which each token has one successor, the mean loss of the last five of thirty steps is a fifth below the first."""
    rng = trial.rng("learn")
    with temporary_folder() as folder:
        stream = write_shards(folder / "train", [np.tile(rng.permutation(VOCAB), 40)])
        train = Tokens(stream, VOCAB, batch=4, seq=9, seed=int(rng.integers(1000)))
        settings = {"epochs": 1, "micro_batch": 4, "learning_rate": 1e-2}
        problem = Pretraining(small_architecture(rng), trial.seed, train, None, folder / "output", TOKENIZER, settings)
        losses = [step.loss for step in trial.pretrainer.run(problem).steps]
    yield from same("number of steps", 30, len(losses))
    yield value_at_least("fall of the loss over the first", 1 - float(np.mean(losses[-5:])) / losses[0], 0.2)
