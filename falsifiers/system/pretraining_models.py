"""The decoder that pre-training trains: its start, validation, the hash of the optimiser's state, and checkpoints."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load_file

from blackswan import reference
from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.comparison import (
    Comparison,
    broken,
    value_at_most,
    value_inside,
    value_within,
)
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import Tokens
from blackswan.falsifiers.system.adapter_files import generated
from blackswan.falsifiers.system.broken_calls import ERRORS
from blackswan.falsifiers.system.checkpoint_parts import LLAMA3
from blackswan.falsifiers.system.command_models import BESIDE_THE_TOKENIZER
from blackswan.falsifiers.system.pretraining import (
    CONFIG,
    SIZES,
    TOKENIZER,
    VOCAB,
    WEIGHTS,
    small_architecture,
    small_pretraining,
    temporary_folder,
)
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.token_streams import pieces_of, write_shards
from blackswan.falsifiers.system.trial import Trial, may_be_non_finite
from blackswan.reference.decoder import parameter_shapes
from blackswan.reference.table import Array, Arrays

if TYPE_CHECKING:
    from blackswan.falsifiers.subjects.impl.pretrainer import TrainedDecoder

MANY = 48_000
"""Tokens of a vocabulary by which two rows of 50 have more than 2²² logits."""
LARGE = 2**20 + 1
"""Numbers of a moment that is larger than those of small decoders."""
LONG_ROW = 2**16 + 200
"""Tokens of a row that the positions of 16 bits do not count."""
END = 1  # <eos> of the shipped tokenizer
EARLIER = {3: [-0.0766443, 0.3598815, -0.7820168], 2**40 + 3: [0.8843325, 0.2190250, 1.1457776]}
"""The first numbers of the embedding, over 0.02, that earlier versions drew of each seed: adapters were trained on them."""
STEPS = 8
"""A decoder that is trained by hand has a schedule of so many."""
LOST, SUMMED = 30, 1e-10
"""So many small losses beside a large one, and a share of their mean that sums in float64 keep."""
HELD = 2
"""Batches of a validation that may be in memory: the one that is computed, and the next."""
BROKEN = (("swiglu", 1), ("gradient of swiglu", 0), ("gradient of swiglu", 1), ("clip_by_global_norm", 0))
"""Operations at which a step breaks off, with the number of the call."""
OF_SUMS = 1e-4
"""The error, relative to a tensor's norm, that sums in another order leave at most in a step; a gradient counted twice leaves 1."""
HUGE = 1e37
"""A gain of this size leaves the loss finite, and not the gradient."""
ROOT = 1e20
"""A weight whose square is larger than any number in float32."""


def _random_loss(trial: Trial, tokens: int) -> float:
    """The held-out loss of random weights on so many random tokens."""
    rng = trial.rng("random tokens")
    with temporary_folder() as folder:
        stream = Tokens(write_shards(folder, [rng.integers(0, VOCAB, tokens)]), VOCAB, batch=8, seq=12)
        return trial.pretrainer.random(small_architecture(rng), trial.seed).validate(stream, 4)


def random_weights_know_nothing(trial: Trial) -> Iterator[Comparison]:
    """The loss of random weights on random tokens lies in [0.5, 1.5 ln V], the original's band, and within a tenth of ln V.

    The weights themselves are those with which the families begin.
    """
    loss, middle = _random_loss(trial, 300), float(np.log(VOCAB))
    yield value_inside("loss", loss, 0.5, 1.5 * middle)
    yield value_within("loss near ln V", loss, 0.9 * middle, 1.1 * middle)
    yield from _as_families_begin(trial)


def _as_families_begin(trial: Trial) -> list[Comparison]:
    """Norms are one, biases zero, and the n elements of all matrices, over 0.02, independent draws of N(0, 1).

    Their mean and their mean square are within seven standard deviations, 1/√n and √(2/n), of 0 and 1. The mean product of the first m
    elements of two matrices is within seven of its own, 1/√m, of 0.
    """
    scalars = generated(trial.rng("random"), trial.seed, "float32", family=("qwen2", "qwen3", "llama")[trial.seed % 3]).scalars
    tensors = trial.pretrainer.random(scalars, trial.seed).parameters()
    matrices = [value.ravel().astype(np.float64) / 0.02 for value in tensors.values() if value.ndim == 2]
    larger = trial.pretrainer.random(scalars, trial.seed + 2**32).parameters()
    others = [value.ravel().astype(np.float64) / 0.02 for value in larger.values() if value.ndim == 2]
    drawn, count = np.concatenate(matrices), min(map(len, matrices))
    alike = np.stack([each[:count] for each in matrices])
    products = np.abs(np.triu(alike @ alike.T / count, 1))
    plain = {name: value for name, value in tensors.items() if value.ndim == 1}
    bound = 7 / np.sqrt(len(drawn))
    moved = {f"tied {tied}": trial.pretrainer.draws({**scalars, "tied": tied}, trial.seed) for tied in (False, True)}
    before = [
        value_at_most(f"numbers of the seed {seed} less those of before", float(np.abs(first / 0.02 - earlier).max()), 1e-3)
        for seed, earlier in EARLIER.items()
        for first in [trial.pretrainer.random(scalars, seed).parameters()["model.embed_tokens.weight"].ravel()[: len(earlier)]]
    ]
    return [
        *before,
        *same("random numbers of the process that were drawn or seeded", dict.fromkeys(moved, ()), moved),
        *same("vectors", {name: np.full_like(value, not name.endswith(".bias")) for name, value in plain.items()}, plain),
        value_inside("mean of the matrices / 0.02", float(drawn.mean()), -bound, bound),
        value_inside("mean square of the matrices / 0.02²", float(np.square(drawn).mean()), 1 - np.sqrt(2) * bound, 1 + np.sqrt(2) * bound),
        value_at_most("matrices that are alike for a seed of more than 32 bits", sum(map(np.array_equal, matrices, others)), 0),
        value_inside("largest mean product of two matrices / 0.02²", float(products.max()), 0.0, 7 / np.sqrt(count)),
    ]


@may_be_non_finite("answer")
def nothing_to_average_is_nan(trial: Trial) -> list[Comparison]:
    """The validation loss of a stream that predicts nothing is NaN; that of one with two tokens is not."""
    return same("NaN of a stream of one token, of two", [True, False], [bool(np.isnan(_random_loss(trial, tokens))) for tokens in (1, 2)])


def validation_is_pure(trial: Trial, *, share: float) -> list[Comparison]:
    """The held-out loss of the shipped checkpoint is below share · ln V and the same again, and the parameters stay those of the file.

    What is trainable stays so, and what is frozen; there are no gradients, after a step neither. Of a large vocabulary the loss is the
    reference's mean over all tokens that are predicted.
    """
    rng = trial.rng("validation")
    with temporary_folder() as folder:
        stream, vocab = _heldout(int(rng.integers(5, 10)))
        shards = write_shards(folder, pieces_of(stream, rng))
        tokens, micro = Tokens(shards, vocab, int(rng.integers(1, 6)), int(rng.integers(24, 48))), int(rng.integers(1, 4))
        decoder = trial.pretrainer.load(CHECKPOINT)
        before = decoder.parameters()
        frozen = decoder.held()
        loss, again = decoder.validate(tokens, micro), decoder.validate(tokens, micro)
        after = decoder.parameters(), decoder.held()
        decoder.train(_ids(trial, 0))
        trained = decoder.held()
        decoder.validate(tokens, micro)
        held = decoder.validation_batches_held(tokens)
    stored = load_file(CHECKPOINT / WEIGHTS)
    return [
        value_at_most("held-out loss", loss, share * float(np.log(vocab))),
        *same("loss again", loss, again),
        value_at_most("batches of a validation that are held", held, HELD),
        *same("before validation", stored, before),
        *same("after validation", (stored, frozen), after),
        *same("trainable parameters, and gradients, after a step", ([*before], []), trained),
        *same("trainable parameters, and gradients, after a step and validation", trained, decoder.held()),
        *_mean_over_tokens(trial, MANY, 50),
        *_mean_over_tokens(trial, VOCAB, 1100),
        *_positions_of_long_rows(trial),
        _mean_beside_a_large_loss(trial),
    ]


def _mean_beside_a_large_loss(trial: Trial) -> Comparison:
    """The mean of many losses is theirs also where one is so large that float32 loses the others beside it."""
    losses = [2.0**24, *[1.0] * LOST]
    with temporary_folder() as folder:
        tokens = Tokens(write_shards(folder, [np.zeros(len(losses) + 1, np.int64)]), VOCAB, 8, 2)
        found = trial.pretrainer.random(small_architecture(trial.rng("large loss")), trial.seed).mean_of(tokens, losses)
    mean = math.fsum(losses) / len(losses)
    return value_at_most("share of a mean held-out loss that is lost", abs(found - mean) / mean, SUMMED)


def _positions_of_long_rows(trial: Trial) -> list[Comparison]:
    """A token is rotated by the number of real tokens before it, which may be more than 16 bits count."""
    rng = trial.rng("long rows")
    decoder = trial.pretrainer.random({**small_architecture(rng), "layers": 1}, trial.seed)
    mask = np.arange(LONG_ROW) >= np.array([[0], [rng.integers(1, 99)]])
    expected = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    return same("positions of queries and keys in long rows", [expected] * 2, [each.astype(np.int64) for each in decoder.positions(mask)])


def _mean_over_tokens(trial: Trial, vocab: int, seq: int) -> list[Comparison]:
    """Of a large vocabulary, or of long rows, in three batches, of which the last one has fewer rows, and a shorter one among them."""
    rng, batch, more = trial.rng(f"many tokens {seq}"), 4, 2
    architecture = {**small_architecture(rng), "vocab": vocab}
    stream = rng.integers(0, vocab, (2 * batch + 1) * (seq - 1) + more + 1)
    decoder = trial.pretrainer.random(architecture, trial.seed)
    steps, state = decoder.state()
    decoder.restore(steps, {name: 20 * value if value.ndim > 1 else value for name, value in state.items()})  # the rows' losses differ
    weights = {f"parameters/{name}": np.asarray(value, np.float64) for name, value in decoder.parameters().items()}
    with temporary_folder() as folder:
        tokens = Tokens(write_shards(folder, pieces_of(stream, rng)), vocab, batch, seq)
        found = {micro: decoder.validate(tokens, micro) for micro in (1, batch - 1, batch)}
    rows = [stream[start : start + seq] for start in range(0, len(stream) - 1, seq - 1)]
    ids, mask = np.stack([np.pad(row, (0, seq - len(row))) for row in rows]), np.arange(seq) < np.array([[len(row)] for row in rows])
    given = [{"input_ids": ids[row, None], "mask": mask[row, None], **weights} for row in range(len(rows))]
    losses = [float(reference.evaluate("language_model_loss", each, architecture)["loss"]) for each in given]
    mean = float(np.average(losses, weights=mask.sum(axis=1) - 1))
    return [trial.near(f"loss of {vocab} words, {micro} rows of {seq} tokens at a time", mean, loss) for micro, loss in found.items()]


def _heldout(scripts: int) -> tuple[Array, int]:
    """The tokens of held-out scripts, each ended by the end token, through the tokenizers library; and the vocabulary."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    lines = CORPUS_HELDOUT.read_text(encoding="utf-8").splitlines()[:scripts]
    return np.concatenate([[*tokenizer.encode(json.loads(line)["input"]).ids, END] for line in lines]), tokenizer.get_vocab_size()


def state_hash_tells_states_apart(trial: Trial) -> Iterator[Comparison]:
    """The hash is SHA-256 over steps and moments; it is the same for the same state, and another for every other.

    The same state has a decoder, too, at which gradients of something else were left before its steps, or of which steps broke off.
    """
    rng, ask = trial.rng("state"), trial.pretrainer.state_hash
    architecture, made = small_architecture(rng), int(rng.integers(1, 3))
    (steps, moments), again = (_trained(trial, architecture, made, beside=beside).moments() for beside in (False, True))
    names = sorted(moments)
    chosen = [*rng.choice(names, 4, replace=False), next(name for name in names if name.startswith("exp_avg_sq/"))]
    base = ask(steps, moments)
    large = rng.random(LARGE, np.float32)
    states = {"the same state": again, "one more step": (steps + 1, moments)}
    wide = {name: np.nextafter(value.astype(np.float64), np.inf) for name, value in moments.items()}  # rounded they are the same
    states |= {"moments in float64": (steps, wide), "a large moment": (steps, {**moments, names[-1]: large})}
    states |= {f"a flipped bit of {name}": (steps, {**moments, name: _flipped(moments[name], rng)}) for name in chosen}
    yield value_at_most("SHA-256 of the state differs", int(base != _sha256(steps, moments)), 0)
    for name, state in states.items():
        digest = ask(*state)
        yield value_at_most(f"SHA-256 of {name} differs", int(digest != _sha256(*state)), 0)
        yield value_at_most(f"wrongly told apart or not: {name}", int((digest == base) is (state is not again)), 0)
    yield from _broken_steps(trial, architecture)
    yield from _turned_weights(trial, architecture)


def _turned_weights(trial: Trial, architecture: Mapping[str, Any]) -> Iterator[Comparison]:
    """Weights that lie by columns in memory have the same moments after a step as others, and move."""
    plain, turned = (trial.pretrainer.random(architecture, trial.seed, turned=turned) for turned in (False, True))
    before = turned.parameters()
    plain.train(_ids(trial, 0)), turned.train(_ids(trial, 0))
    error = _error(plain.moments()[1], turned.moments()[1])
    yield value_at_most("largest error of a moment after a step on weights that lie by columns", error, OF_SUMS)
    turned.train(_ids(trial, 1))
    moved = [name for name, value in turned.parameters().items() if (value != before[name]).any()]
    yield from same("weights that lie by columns and have moved", [*before], moved)


def _broken_steps(trial: Trial, architecture: Mapping[str, Any]) -> Iterator[Comparison]:
    """A step that an operation breaks off changes nothing; where it is made all the same, it is the step."""
    rng = trial.rng("broken")
    plain, mixed = (trial.pretrainer.random(architecture, trial.seed) for _ in range(2))
    for number, (operation, nth) in enumerate(BROKEN):
        ids, error = _ids(trial, number), str(rng.choice(ERRORS))
        label = f"step {number + 1}, broken off by {error} in {operation}"
        if not mixed.breaks(ids, operation, nth, error):
            plain.train(ids)
        yield from same(f"gradients left by {label}", [], mixed.held()[1])
        (steps, expected), (made, found) = plain.state(), mixed.state()
        yield from same(f"steps made after {label}", steps, made)
        yield value_at_most(f"largest error of a tensor of the state after {label}", _error(expected, found), OF_SUMS)
        plain.train(ids), mixed.train(ids)


def _error(expected: Mapping[str, Array], found: Mapping[str, Array]) -> float:
    """The largest norm of a tensor's error, over the tensor's own norm."""
    errors = (np.linalg.norm(found[name] - value) / max(float(np.linalg.norm(value)), 1e-30) for name, value in expected.items())
    return float(max(errors))


def _trained(trial: Trial, architecture: Mapping[str, Any], steps: int, *, beside: bool = False) -> "TrainedDecoder":
    """A decoder after so many steps; `beside` these, gradients of something else are there before each."""
    decoder = trial.pretrainer.random(architecture, trial.seed)
    for number in range(steps):
        if beside:
            decoder.backward(_ids(trial, number + STEPS))
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
    content = (name.encode() + b"\0" + moments[name].astype(moments[name].dtype.newbyteorder("<")).tobytes() for name in sorted(moments))
    return hashlib.sha256(steps.to_bytes(8, "little") + b"".join(content)).hexdigest()


@may_be_non_finite("answer.*")
def non_finite_stops_the_run(trial: Trial) -> Iterator[Comparison]:
    """A step raises a FloatingPointError that names step and place for NaN, an infinity or a huge value in a parameter; nothing changes.
    So it is where nothing is clipped."""
    rng = trial.rng("non-finite")
    architecture, made = small_architecture(rng), int(rng.integers(0, 3))
    shapes = parameter_shapes(architecture)
    inner = [name for name in shapes if ".layers." in name]  # a row of the embedding is used only where its token occurs
    for value, clipped in ((np.nan, True), (np.inf, True), (-np.inf, False), (HUGE, True), (HUGE, False)):
        name = "model.norm.weight" if value == HUGE else str(rng.choice(inner))
        decoder = _trained(trial, architecture, made)
        decoder.overwrite(name, int(rng.integers(np.prod(shapes[name]))), float(value))
        if not clipped:
            decoder.clip_nothing()
        before = {**decoder.parameters(), **_state(decoder)}
        where = r"(\(\w+\)|norm)" if value == HUGE else re.escape(name)
        step = partial(decoder.train, _ids(trial, made))
        yield trial.refuses(f"{value} in {name}", step, f"step {made + 1}.*{where}", "FloatingPointError")
        yield from same(f"rows at a time after {value} in {name}", 2, decoder.most_rows(_ids(trial, made)))
        yield from same(f"after {value} in {name}", before, {**decoder.parameters(), **_state(decoder)})
    yield _non_finite_at_last(trial, {**architecture, "tied": False})


def _non_finite_at_last(trial: Trial, architecture: Mapping[str, Any]) -> Comparison:
    """What overflows for a token that only the last row has, which is in a micro-batch of its own, is named by its call too. That token
    alone has a first component, which the activation squares."""
    decoder, ids, hidden = trial.pretrainer.random(architecture, trial.seed), _ids(trial, 0) % (VOCAB - 1), architecture["hidden"]
    ids[-1, 3] = VOCAB - 1
    for token in range(VOCAB):
        decoder.overwrite("model.embed_tokens.weight", token * hidden, 50.0 * (token == VOCAB - 1))
    for column in range(architecture["heads"] * architecture["head_dim"]):
        decoder.overwrite("model.layers.0.self_attn.o_proj.weight", column, 0.0)
    for part in ("gate", "up"):
        decoder.overwrite(f"model.layers.0.mlp.{part}_proj.weight", 0, ROOT)
    return trial.refuses("overflow in the last micro-batch", partial(decoder.train, ids), r"step 1: .*\(swiglu\)", "FloatingPointError")


def _state(decoder: "TrainedDecoder") -> Arrays:
    steps, moments = decoder.moments()
    return {**moments, "steps": np.asarray(steps)}


def checkpoint_is_usable(trial: Trial) -> Iterator[Comparison]:
    """Weights in the file and through the loader equal those in memory bit for bit; architecture and tokenizer, all of it, beside them."""
    rng = trial.rng("checkpoint")
    architecture, step = small_architecture(rng), int(rng.integers(1, 10**6))
    with temporary_folder() as parent:
        decoder = trial.pretrainer.random(architecture, trial.seed)
        folder = decoder.save(parent / "checkpoints", TOKENIZER, step)
        names = sorted(path.name for path in folder.iterdir())
        if names != [CONFIG, WEIGHTS, TOKENIZER.name]:
            yield broken("files", "not a whole checkpoint", f"{CONFIG}, {WEIGHTS}, {TOKENIZER.name}", ", ".join(names))
            return
        tokenizer, config = (folder / TOKENIZER.name).read_bytes(), json.loads((folder / CONFIG).read_text())
        stored, loaded = load_file(folder / WEIGHTS), trial.pretrainer.load(folder).parameters()
        yield from _tokenizer_is_whole(decoder, parent)
        yield from _tokenizer_of_links(trial)
    yield value_at_most("tokenizers that differ from the one given", int(tokenizer != TOKENIZER.read_bytes()), 0)
    yield from same("hidden_size", architecture["hidden"], config["hidden_size"])
    yield from same("in the file", decoder.parameters(), stored)
    yield from same("loaded", decoder.parameters(), loaded)


def _tokenizer_is_whole(decoder: "TrainedDecoder", parent: Path) -> Iterator[Comparison]:
    """A checkpoint has every file that belongs to the tokenizer, and no other that lies there. Where all are changed during the run it
    has all of before or all of after; where they are taken away, all of before, or there is none.
    """
    before = {TOKENIZER.name: TOKENIZER.read_text(), **BESIDE_THE_TOKENIZER}
    after = {name: text + "\n" for name, text in before.items()}
    source, output = parent / "model", parent / "others"

    def write(files: Mapping[str, str]) -> None:
        source.mkdir(exist_ok=True)
        for name, text in files.items():
            (source / name).write_text(text)

    cases: list[tuple[str, Callable[[], object], list[dict[str, str]]]] = [
        ("the run's start", lambda: None, [before]),
        ("a change of all", partial(write, after), [before, after]),
        ("they were taken away", partial(shutil.rmtree, source), [before, {}]),
    ]
    for step, (name, meanwhile, allowed) in enumerate(cases):
        write({**before, "README.md": "of the model"})
        try:
            decoder.save(output, source / TOKENIZER.name, step, meanwhile)
        except SubjectError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        written = list(output.glob("*/*"))
        found = {path.name: path.read_text() for path in written if path.name not in (CONFIG, WEIGHTS)}
        shutil.rmtree(output, ignore_errors=True)
        fits = found in allowed and bool(found) == bool(written)
        yield from same(f"files of the tokenizer after {name}", found if fits else allowed[0], found)


def _tokenizer_of_links(trial: Trial) -> list[Comparison]:
    """A run's checkpoint has every file of a tokenizer whose files are links to others by other names, as downloaded ones are."""
    files = {TOKENIZER.name: TOKENIZER.read_text(), **BESIDE_THE_TOKENIZER}
    with small_pretraining(trial, 1) as (problem, _), temporary_folder() as links, temporary_folder() as blobs:
        for number, (name, text) in enumerate(files.items()):
            (blobs / str(number)).write_text(text)
            (links / name).symlink_to(blobs / str(number))
        trial.pretrainer.run(replace(problem, tokenizer=links / TOKENIZER.name))
        written = [path for path in problem.output.glob("checkpoints/*/*") if path.name not in (CONFIG, WEIGHTS)]
        return same("files of a tokenizer of links", files, {path.name: path.read_text() for path in written})


def refuses_checkpoint_without_tokenizer(trial: Trial) -> Iterator[Comparison]:
    """A checkpoint is refused without a tokenizer, and over a folder that exists, which stays as it is."""
    architecture = small_architecture(trial.rng("checkpoint"))
    decoder, other = (trial.pretrainer.random(architecture, trial.seed + number) for number in (0, 1))
    with temporary_folder() as parent:
        output = parent / "checkpoints"
        (parent / "data" / TOKENIZER.name).mkdir(parents=True)  # a folder is given where its file is meant
        steps: list[str] = []
        for name, place in (("no tokenizer", parent), ("a folder for a tokenizer", parent / "data")):
            save = partial(decoder.save, output, place / TOKENIZER.name, 3, meanwhile=partial(steps.append, name))
            yield trial.refuses(name, save, TOKENIZER.name)
            yield from same(f"{name}: steps before the refusal", [], steps)
            if output.exists():
                yield broken(name, "something was written")
        folder = decoder.save(output, TOKENIZER, 3)
        before = (folder / WEIGHTS).read_bytes()
        yield trial.refuses("the folder exists", lambda: other.save(output, TOKENIZER, 3), "exists")
        if (folder / WEIGHTS).read_bytes() != before:
            yield broken("the folder exists", "it was changed")


def refuses_to_start(trial: Trial) -> Iterator[Comparison]:
    """No run starts from weights or an architecture alone, an encoder, weights of another architecture, or a folder that is not there.

    Nor does a step move weights in half precision or NF4; nor is there one after the schedule's last, or on rows of one token.
    """
    with temporary_folder() as parent:
        other, scaled, encoder, nowhere = (parent / name for name in ("other", "scaled", "encoder", "nowhere"))
        for folder, change in ((other, {"rms_norm_eps": 1e-5}), (scaled, {"rope_parameters": LLAMA3}), (encoder, {"model_type": "bert"})):
            shutil.copytree(CHECKPOINT, folder)
            config = json.loads((folder / CONFIG).read_text())
            (folder / CONFIG).write_text(json.dumps(config | change))
        starts: dict[str, tuple[Path | None, Path | None, str]] = {
            "architecture without weights": (CHECKPOINT, None, "weights"),
            "weights without architecture": (None, CHECKPOINT, "architecture"),
            "encoder": (encoder, encoder, "encoder"),
            "encoder's architecture, decoder's weights": (encoder, CHECKPOINT, "encoder"),
            "weights of another architecture": (other, CHECKPOINT, f"{CHECKPOINT} and {other} differ in eps .1e-06, 1e-05.;"),
            "weights of plain frequencies": (scaled, CHECKPOINT, rf"{CHECKPOINT} and {scaled} differ in rope_scaling .None, "),
            "an architecture of plain frequencies": (CHECKPOINT, scaled, rf"{scaled} and {CHECKPOINT} differ in rope_scaling .*, None.;"),
            "no such architecture": (nowhere, CHECKPOINT, "nowhere"),
            "no such weights": (CHECKPOINT, nowhere, "nowhere"),
        }
        yield from (trial.refuses(name, partial(trial.pretrainer.initial, *given), message) for name, (*given, message) in starts.items())
    for dtype, nf4, message in (("bfloat16", False, "float32"), ("float16", False, "float32"), ("float32", True, "NF4")):
        step = partial(trial.pretrainer.load(CHECKPOINT, dtype, nf4).train, _ids(trial, 0))
        yield trial.refuses(f"a step on {dtype}{' in NF4' * nf4}", step, message, "ValueError")
    both = trial.pretrainer.initial(CHECKPOINT, CHECKPOINT)
    yield from _no_such_step(trial)
    yield from _starts_in_float32(trial)
    yield from _starts_at_random(trial)
    yield from same("given both", load_file(CHECKPOINT / WEIGHTS), both.parameters())


def _no_such_step(trial: Trial) -> list[Comparison]:
    """A step on rows that predict nothing is refused, and so is one more than the schedule has; neither changes anything."""
    decoder = trial.pretrainer.random(small_architecture(trial.rng("no such step")), trial.seed)
    decoder.train(_ids(trial, 0))
    before, alone = {**decoder.parameters(), **_state(decoder)}, _ids(trial, 0)[:, :1]
    found = [trial.refuses("a step on rows of one token", partial(decoder.train, alone), "predict", "ValueError")]
    found += same("after a step on rows of one token", before, {**decoder.parameters(), **_state(decoder)})
    ids = np.concatenate([_ids(trial, number) for number in range(5)])  # of which two rows are computed at a time
    ids[-1, 1] = -1
    found.append(
        trial.refuses("a step on a token that is none", partial(decoder.train, ids), rf"input_ids\[{len(ids) - 1}, 1\]", "ValueError")
    )
    found += same("after a step on a token that is none", before, {**decoder.parameters(), **_state(decoder)})
    for number in range(1, STEPS):
        decoder.train(_ids(trial, number))
    before = {**decoder.parameters(), **_state(decoder)}
    found.append(trial.refuses("a step after the last one", partial(decoder.train, _ids(trial, 0)), f"ends after {STEPS}", "IndexError"))
    return [*found, *same("after a step that there is not", before, {**decoder.parameters(), **_state(decoder)})]


def _starts_in_float32(trial: Trial) -> list[Comparison]:
    """A run trains parameters in float32 that are the numbers of the stored weights, whatever their dtype."""
    model = generated(trial.rng("stored"), trial.seed, ("bfloat16", "float16")[trial.seed % 2])
    with temporary_folder() as parent:
        start = model.write_checkpoint(parent / "model")
        found = trial.pretrainer.initial(start, start).parameters()
    expected = {name: np.asarray(value, np.float32) for name, value in model.decoder.items()}
    dtypes = same("dtypes of parameters", ["float32"], sorted({value.dtype.name for value in found.values()}))
    return [*dtypes, *same("parameters of stored weights", expected, found)]


def _starts_at_random(trial: Trial) -> list[Comparison]:
    """Where nothing is given the weights are the random ones of the seed; they are frozen up to the first step, the head too.

    Of a decoder in float64 the moments are float64 too.
    """
    architecture = small_architecture(trial.rng("start"))
    seeds = [trial.seed, trial.seed + 1, trial.seed + 2**32]
    given = [trial.pretrainer.random(architecture, seed).parameters() for seed in seeds]
    wide = trial.pretrainer.load(CHECKPOINT, "float64")
    wide.train(_ids(trial, 0))
    return [
        *same("seeds of their own weights", len(seeds), len({each["model.embed_tokens.weight"].tobytes() for each in given})),
        *same(
            "weights of each seed where nothing is given",
            given,
            [trial.pretrainer.default(architecture, seed).parameters() for seed in seeds],
        ),
        *same("trainable before a step", ([], []), trial.pretrainer.random({**architecture, "tied": False}, trial.seed).held()),
        *same("dtypes of a state in float64", ["float64"], sorted({value.dtype.name for value in wide.state()[1].values()})),
    ]


def default_architecture_is_370m(trial: Trial) -> list[Comparison]:
    """The number of parameters, counted from the sizes here, in [366, 374] million, and as the subject counts it; Llama 2's ε and θ."""
    sizes, counted = trial.pretrainer.default_architecture()
    count = sum(int(np.prod(shape)) for shape in parameter_shapes(sizes).values())
    small = [{**SIZES, "family": "qwen2", "eps": 1e-6, "theta": 1e4, "tied": tied} for tied in (True, False)]
    counts = [sum(int(np.prod(shape)) for shape in parameter_shapes(each).values()) for each in small]
    return [
        *same("parameters counted, with a tied head and without", counts, [trial.pretrainer.count(each) for each in small]),
        value_within("parameters", float(count), 366e6, 374e6),
        *same("parameters counted", count, counted),
        *same("family, ε and θ", ("llama", 1e-5, 1e4), tuple(sizes[name] for name in ("family", "eps", "theta"))),
    ]
