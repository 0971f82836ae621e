"""Pre-training as `impl` does it: token shards and their batches, runs, validation, checkpoints, the state of the optimiser."""

import argparse
import errno
import fcntl
import gc
import hashlib
import io
import math
import os
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock
from weakref import WeakSet, ref

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks

from blackswan.falsifiers.subjects.conversion import config_of
from blackswan.falsifiers.subjects.doors.files import StreamRows, Tokens
from blackswan.falsifiers.subjects.doors.training import Architecture, Pretraining, PretrainingRecord
from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.impl.allocator import allocated
from blackswan.falsifiers.subjects.impl.disks import limited
from blackswan.falsifiers.subjects.impl.kill_points import flushes
from blackswan.falsifiers.subjects.impl.slow_disk import slow, until_the_next_step
from blackswan.falsifiers.subjects.impl.watching import broken_off, failing
from blackswan.falsifiers.subjects.patching import opening
from blackswan.falsifiers.subjects.protocol import Session
from blackswan.falsifiers.subjects.shared import random_states
from blackswan.impl import decoder_optimiser, dispatch, pretrain, pretrain_run, token_shards
from blackswan.impl.checkpoint import load_decoder
from blackswan.impl.commands import pretrain as command
from blackswan.impl.decoder import Decoder, parameter_count
from blackswan.impl.dispatch import replaced
from blackswan.impl.folder import LOCK
from blackswan.impl.token_shards import TokenBatch, TokenBatches, TokenShards
from blackswan.impl.tokens import load_tokenizer
from blackswan.reference.table import Array

STEPS = 8
"""No check trains a decoder for longer, outside a run."""


class Pretrainer(Door):
    """Language-model pre-training: streams of tokens, runs, their parts, and what they start from."""

    def epoch(self, tokens: Tokens, epoch: int, start: int = 0, meanwhile: Callable[[], object] = lambda: None) -> StreamRows:
        """The rows of an epoch from batch `start` on, where torch's default device holds no numbers and `impl` may only read the shards.
        Between its first batch and the others the next epoch is begun, and `meanwhile` is what happens then."""
        with torch.device("meta"):
            with _only_read(tokens.folder):
                batches = _batches(tokens)
                found = list(islice(stream := batches.epoch(epoch, start), 1))
                next(batches.epoch(epoch + 1), None)
            meanwhile()
            with _only_read(tokens.folder):
                found += stream
        empty = torch.zeros(0, tokens.seq, dtype=torch.int64)
        ids, mask = torch.cat([empty, *(batch.input_ids for batch in found)]), torch.cat([empty.bool(), *(batch.mask for batch in found)])
        return StreamRows(ids.numpy(), mask.numpy(), [len(batch.mask) for batch in found], len(batches))

    def epoch_of_changed(self, tokens: Tokens, content: bytes, change: Callable[[], object]) -> StreamRows:
        """The first epoch, where `change` is what happens as soon as that content was hashed."""
        new = hashlib.new

        def noted(*given: bytes) -> Any:
            digest, read = new("sha256", *given), [b"".join(given)]

            def update(more: bytes) -> None:
                digest.update(more)
                read.append(bytes(more))
                if b"".join(read) == content:
                    change()

            return SimpleNamespace(update=update, hexdigest=digest.hexdigest, digest=digest.digest)

        named = mock.patch("hashlib.new", lambda name, *given: noted(*given) if name.lower() == "sha256" else new(name, *given))
        with mock.patch("hashlib.sha256", noted), named:
            batches = _batches(tokens)
        found = [*batches.epoch(0)]
        return StreamRows(torch.cat([one.input_ids for one in found]).numpy(), torch.cat([one.mask for one in found]).numpy(), [], 0)

    def rows_of_repeated(self, lengths: Sequence[int], seq: int, rows: Sequence[int], seed: int | None = None) -> StreamRows:
        """Rows of an epoch of a stream whose shards are each one token over and over, 0 and 1 and so on, so many times; no file holds
        them."""
        index = {"dtype": "uint16", "shards": [{"file": str(token), "tokens": length} for token, length in enumerate(lengths)]}

        def opened(path: Path, entry: Mapping[str, Any], *_: object) -> Array:
            return np.broadcast_to(np.uint16(int(path.name)), entry["tokens"])

        with TemporaryDirectory() as parent, mock.patch.multiple(token_shards, _read_index=lambda _: index, _open_shard=opened):
            (Path(parent) / token_shards.INDEX).touch()
            batches = TokenBatches(TokenShards(Path(parent), len(lengths)), batch=1, seq=seq, seed=seed)
        found = [next(batches.epoch(0, row)) for row in rows]
        ids, mask = (torch.cat(each).numpy() for each in zip(*((batch.input_ids, batch.mask) for batch in found), strict=True))
        return StreamRows(ids, mask, [1] * len(found), len(batches))

    def run(
        self,
        problem: Pretraining,
        stop_after: int | None = None,
        resume: bool = False,
        stop_at: int | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        dtype: str = "float32",
        slowly: bool = False,
        interrupt_at: int | None = None,
    ) -> PretrainingRecord:
        """A run, killed after a step where one is named, or at one of its flushes, from 0; or, resumed, the rest of one that was killed.

        It is killed by an exception: of the function that hears of each step, or of the one that flushes a file. `meanwhile` is what
        another process does in the moment before this one alone may write. `slowly`: other threads hash and write a state so slowly that
        the next step is made meanwhile. Ctrl-C comes in place of the move of a parameter of that number, from 0, over all steps.
        Where the head is not tied the weights lie by columns. A refusal has to leave them as they are.
        """
        decoder = self._random(problem.architecture, problem.seed, turned=not problem.architecture["tied"]).to(getattr(torch, dtype))
        before = _parameters(decoder)
        steps, events, passes, free = list[pretrain_run.PretrainStep](), list[str](), list[tuple[int, int]](), list[str]()
        held = WeakSet[_Saved]()
        decoder.register_forward_pre_hook(lambda _, given: passes.append((len(given[0]), len(held))))
        train, validation = _batches(problem.train), None if problem.validation is None else _batches(problem.validation)
        settings = pretrain_run.PretrainSettings(**problem.settings)

        def on_step(step: pretrain_run.PretrainStep) -> None:
            steps.append(step)
            free.extend([f"step {step.step}"] * _is_free(problem.output))
            if step.step == stop_after:
                raise _KilledError

        def on_flush(name: str) -> None:
            events.append(name)
            free.extend([name] * _is_free(problem.output))
            if len(events) - 1 == stop_at:
                raise _KilledError

        began = list[int]()
        result = pretrain_run.PretrainResult((), (), "")
        alone = _before_a_lock(problem.output, meanwhile)
        disk = slow(until_the_next_step([*decoder.parameters()])) if slowly else nullcontext()
        interrupted = nullcontext() if interrupt_at is None else failing("adamw_step", interrupt_at, KeyboardInterrupt)
        ends = (_KilledError,) if interrupt_at is None else (_KilledError, KeyboardInterrupt)
        with suppress(*ends), flushes(problem.output, on_flush), disk, alone, interrupted, _keeping(held):
            given = (decoder, train, validation, settings, problem.output, problem.tokenizer)
            try:
                result = pretrain_run.pretrain(*given, resume=resume, on_start=partial(began.append, 1), on_step=on_step)
            except (OSError, ValueError) as error:
                if not steps and any((value != before[name]).any() for name, value in _parameters(decoder).items()):
                    raise RuntimeError(f"the run was refused when it had written to the decoder: {error}") from error
                if began and not steps:
                    raise RuntimeError(f"the run was said to begin, and then refused: {error}") from error
                raise
        if steps and not began:
            raise RuntimeError("the run made steps, and was never said to begin")
        losses = [epoch.validation_loss for epoch in result.epochs]
        return PretrainingRecord(steps, losses, _parameters(decoder), result.state_hash, events, passes, free)

    def going_on(self, problem: Pretraining) -> tuple[int, int]:
        """The most bytes that the host's allocator and Python hold until a run goes on, those of its decoder too, and its state's."""
        size = (problem.output / pretrain_run.STATE / "state.safetensors").stat().st_size
        given = _batches(problem.train), None, pretrain_run.PretrainSettings(**problem.settings), problem.output, problem.tokenizer
        began = mock.Mock(side_effect=_KilledError)
        tracemalloc.start()
        try:
            with allocated(torch.device("cpu"), [size]) as taken, suppress(_KilledError):
                pretrain_run.pretrain(self._random(problem.architecture, problem.seed), *given, resume=True, on_start=began)
            return taken["peak"] + tracemalloc.get_traced_memory()[1], size
        finally:
            tracemalloc.stop()

    def taken_by_a_step(self, architecture: Architecture, seed: int) -> float:
        """The most bytes that the host's allocator gives out in a step, over those of parameters and moments."""
        decoder = self._random(architecture, seed)
        step = pretrain.StepFn(decoder, total_steps=1, micro_batch=1, learning_rate=1e-2)
        size = sum(value.nbytes for value in step.optimiser.state().values())
        ids = torch.zeros(1, 2, dtype=torch.int64)
        with allocated(self._device) as taken:
            step.train(TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool)))
        return taken["peak"] / size

    def tokenized(self, corpus: Path, checkpoint: Path) -> int:
        """The number of tokens of a corpus by a checkpoint's tokenizer, of which one document is kept at a time."""
        encoder = token_shards.load_encoder(checkpoint / "tokenizer.json")
        return sum(map(len, token_shards.tokenize(corpus, encoder, 0)))

    def at_once(self, corpus: Path) -> int:
        """The most characters of a corpus that are given to a tokenizer at once."""
        counts = [0]

        def encode(given: str | Sequence[str], **_: Any) -> Any:
            counts.append(len(given) if isinstance(given, str) else sum(map(len, given)))
            return SimpleNamespace(ids=[1]) if isinstance(given, str) else [SimpleNamespace(ids=[1])] * len(given)

        encoder: Any = SimpleNamespace(**dict.fromkeys(("encode", "encode_batch", "encode_batch_fast"), encode))
        return max(*counts, *(max(counts) for _ in token_shards.tokenize(corpus, encoder, 0)))

    def write(
        self,
        folder: Path,
        documents: Iterable[Sequence[float]],
        vocab: int,
        shard_tokens: int = 10**8,
        kind: str = "list",
        most: int | None = None,
    ) -> int:
        """The number of tokens of documents, of which shards are written; of lists, NumPy's arrays or torch's tensors, or of one array
        of 16 bits that is filled again and again. No file may have more than `most` bytes."""
        place = np.zeros(2**16, np.uint16)

        def again(document: Sequence[int]) -> Any:
            place[: len(document)] = document
            return place[: len(document)]

        made: dict[str, Callable[[Any], Any]] = {"list": list, "array": np.array, "tensor": torch.tensor, "one array": again}
        with nullcontext() if most is None else limited(most):
            return token_shards.write_shards(folder, map(made[kind], documents), vocab, shard_tokens)

    def tokens_between(self, folder: Path, vocab: int, start: int, stop: int) -> Array:
        """The ids of a stream from one place to another, of which there may be fewer."""
        return TokenShards(folder, vocab).read(start, stop)

    def loss_of_repeated(self, logits: Array, input_ids: Array) -> float:
        """The language-model loss of ids [batch, seq], all of them real, where every position has the logits [vocab]."""
        ids = torch.tensor(input_ids, device=self._device)
        every = torch.tensor(logits, device=self._device).expand(*ids.shape, len(logits))
        mask = torch.ones_like(ids, dtype=torch.bool)
        return float(dispatch.call("loss", "lm_cross_entropy", logits=every, input_ids=ids, mask=mask))

    def left_of(self, problem: Pretraining) -> list[str]:
        """What outlives a decoder that was trained."""
        decoder = self._random(problem.architecture, problem.seed)
        kept = {name: ref(part) for name, part in (("decoder", decoder), *decoder.named_parameters())}
        settings = pretrain_run.PretrainSettings(**problem.settings)
        pretrain_run.pretrain(decoder, _batches(problem.train), None, settings, problem.output, problem.tokenizer)
        del decoder
        gc.collect()
        return [name for name, part in kept.items() if part() is not None]

    def command(self, model: Path, problem: Pretraining, *flags: str) -> Mapping[str, Array]:
        """The parameters of the last checkpoint that the command writes, which starts at that model."""
        self._command(model, problem, f"--device={self._device}", *flags)
        last = max((problem.output / pretrain_run.CHECKPOINTS).iterdir())
        return _parameters(load_decoder(last, dtype=torch.float32))

    def device_of_command(self, name: str, model: Path, problem: Pretraining, *flags: str) -> list[str]:
        """The devices on which the command makes decoders where it is given one of that name, which need not be there: it ends then."""
        found = list[str]()

        def make(*_: object, device: torch.device | str = "cpu", **__: object) -> Decoder:
            found.append(str(device))
            raise _KilledError

        places = mock.patch("blackswan.impl.device.resolve_device", torch.device)
        with suppress(_KilledError), places, mock.patch.multiple(pretrain, initial_decoder=make, random_decoder=make):
            self._command(model, problem, f"--device={name}", *flags)
        return found

    def _command(self, model: Path, problem: Pretraining, *flags: str) -> None:
        options: dict[str, Any] = {"model": model, "tokens": problem.train.folder, "output": problem.output}
        options |= {"batch": problem.train.batch, "seq": problem.train.seq, "seed": problem.train.seed}
        options |= {} if problem.validation is None else {"validation": problem.validation.folder}
        parser = argparse.ArgumentParser()
        command.add_options(parser)
        given = [f"--{name.replace('_', '-')}={value}" for name, value in {**options, **problem.settings}.items()]
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            command.run(parser.parse_args([*given, *flags]))

    def help(self) -> str:
        """What the command says of its options."""
        command.add_options(parser := argparse.ArgumentParser())
        return parser.format_help()

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a run, as Python makes them of those that are given."""
        return asdict(pretrain_run.PretrainSettings(**given))

    def random(self, architecture: Architecture, seed: int, *, turned: bool = False) -> "TrainedDecoder":
        """A decoder with random weights; `turned`, the matrices lie column by column in memory."""
        return TrainedDecoder(self._random(architecture, seed, turned=turned))

    def draws(self, architecture: Architecture, seed: int) -> tuple[str, ...]:
        """The owners of the process's shared random numbers that have changed after a decoder with random weights was made."""
        torch.rand(())  # so that a generator that is seeded as before has changed, too
        before = random_states()
        self._random(architecture, seed)
        return tuple(owner for owner, state in random_states().items() if state != before[owner])

    def load(self, folder: Path, dtype: str = "float32", nf4: bool = False) -> "TrainedDecoder":
        """The decoder of a checkpoint, whose tokenizer can be read too."""
        load_tokenizer(folder, 16)
        return TrainedDecoder(load_decoder(folder, dtype=getattr(torch, dtype), device=self._device, nf4=nf4))

    def initial(self, architecture: Path | None, weights: Path | None) -> "TrainedDecoder":
        """The decoder that a run of these checkpoint folders starts from."""
        return TrainedDecoder(pretrain.initial_decoder(architecture, weights, device=self._device))

    def default(self, architecture: Architecture, seed: int) -> "TrainedDecoder":
        """The decoder that a run starts from where nothing is given, with that architecture in the place of the default's."""
        with mock.patch.object(pretrain, "LLAMA_370M", config_of(architecture)):
            return TrainedDecoder(pretrain.initial_decoder(seed=seed, device=self._device))

    def count(self, architecture: Architecture) -> int:
        """The number of parameters of an architecture."""
        return pretrain.parameter_count(config_of(architecture))  # type: ignore[attr-defined]  # as it counts there

    def default_architecture(self) -> tuple[Architecture, int]:
        """The architecture that is trained where none is given, and the number of its parameters."""
        return vars(pretrain.LLAMA_370M), parameter_count(pretrain.LLAMA_370M)

    def state_hash(self, steps: int, moments: Mapping[str, Array]) -> str:
        """The hash of an optimiser's state, in hexadecimal."""
        return decoder_optimiser.state_hash({name: torch.tensor(value, device=self._device) for name, value in moments.items()}, steps)

    def _random(self, architecture: Architecture, seed: int, *, turned: bool = False) -> Decoder:
        decoder = pretrain.random_decoder(config_of(architecture), seed=seed, device=self._device)
        for parameter in decoder.parameters() if turned else ():
            parameter.data = parameter.data.t().contiguous().t()
        return decoder


class TrainedDecoder(Session):
    """A decoder that can be trained, validated and saved."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def parameters(self) -> Mapping[str, Array]:
        """The parameters as they are now."""
        return _parameters(self._decoder)

    def overwrite(self, parameter: str, index: int, value: float) -> None:
        """Puts a value into the flattened parameter."""
        self._decoder.get_parameter(parameter).data.view(-1)[index] = value

    def train(self, input_ids: Array) -> float:
        """The loss of an optimiser step on all parameters, on rows [batch, seq] without padding."""
        return self._step.train(TokenBatch(torch.from_numpy(input_ids), torch.ones(input_ids.shape, dtype=torch.bool))).loss

    def most_rows(self, input_ids: Array) -> int:
        """The most rows that are computed at a time, two being a micro-batch, by a step whose numbers are not finite."""
        rows = [0]
        hook = self._decoder.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
        with suppress(FloatingPointError):
            self.train(input_ids)
        hook.remove()
        return max(rows)

    def clip_nothing(self) -> None:
        """No limit holds for the norm of the next steps."""
        self._step.max_norm = math.inf

    def breaks(self, input_ids: Array, operation: str, nth: int, error: str) -> str:
        """The error of a step in which an operation fails; none where the step is made all the same."""
        return broken_off(partial(self.train, input_ids), operation, nth, error)

    def positions(self, mask: Array) -> list[Array]:
        """The positions that queries and keys are rotated by on rows with that mask, whose attention takes each query for its answer: of
        long rows there are too many scores."""
        found = list[Array]()

        def rope(x: torch.Tensor, positions: torch.Tensor, **_: object) -> torch.Tensor:
            found.append(_copy(positions))
            return x

        real = torch.from_numpy(mask).to(next(self._decoder.parameters()).device)
        with torch.no_grad(), replaced({"rope": rope, "attention": lambda q, **_: q}):
            self._decoder(real.long(), real)
        return found

    def backward(self, input_ids: Array) -> None:
        """Leaves the gradients of a loss, which is no step, at the parameters."""
        ids = torch.from_numpy(input_ids).to(self._step.optimiser.device)
        self._decoder.loss(ids, torch.ones_like(ids, dtype=torch.bool)).backward()  # type: ignore[no-untyped-call]  # torch

    def held(self) -> tuple[list[str], list[str]]:
        """The parameters that are trainable, and those that hold a gradient."""
        named = dict(self._decoder.named_parameters())
        return [name for name, value in named.items() if value.requires_grad], [
            name for name, each in named.items() if each.grad is not None
        ]

    def state(self) -> tuple[int, Mapping[str, Array]]:
        """Steps made, parameters and moments, as a state of the run has them."""
        return self._step.optimiser.steps, {name: _copy(value) for name, value in self._step.optimiser.state().items()}

    def restore(self, steps: int, state: Mapping[str, Array]) -> None:
        """Puts a state back."""
        self._step.optimiser.load_state({name: torch.from_numpy(value) for name, value in state.items()}, steps)

    def moments(self) -> tuple[int, Mapping[str, Array]]:
        """Steps made, and both moments of each parameter: `exp_avg/<parameter>` and `exp_avg_sq/<parameter>`."""
        optimiser = self._step.optimiser
        return optimiser.steps, {name: _copy(value) for name, value in optimiser.state().items() if not name.startswith("trainable/")}

    @cached_property
    def _step(self) -> pretrain.StepFn:
        return pretrain.StepFn(self._decoder, total_steps=STEPS, micro_batch=2, learning_rate=1e-2, schedule="constant")

    def validate(self, tokens: Tokens, micro_batch: int) -> float:
        """The mean loss over all tokens of an epoch that are predicted, after that of its first batch; NaN where none is."""
        validate = pretrain.ValFn(self._decoder, micro_batch)
        validate(islice(_batches(tokens).epoch(0), 1))
        return validate(_batches(tokens).epoch(0))

    def mean_of(self, tokens: Tokens, losses: Iterable[float]) -> float:
        """The held-out loss of an epoch whose rows, a micro-batch each, have those losses."""
        left = iter(losses)
        with replaced({"lm_cross_entropy": lambda logits, **_: logits.new_tensor(next(left))}):
            return pretrain.ValFn(self._decoder, 1)(_batches(tokens).epoch(0))

    def validation_batches_held(self, tokens: Tokens) -> int:
        """The most batches of an epoch that live at one time while it is validated on."""
        held, most = WeakSet[TokenBatch](), 0

        def epoch() -> Iterator[TokenBatch]:
            nonlocal most
            for batch in _batches(tokens).epoch(0):
                held.add(batch)
                most = max(most, len(held))
                yield batch

        pretrain.ValFn(self._decoder, 1)(epoch())
        return most

    def save(self, output: Path, tokenizer: Path, step: int, meanwhile: Callable[[], object] = lambda: None) -> Path:
        """Writes the checkpoint after a step, and returns its folder. `meanwhile` is what happens between the run's start and that step."""
        write = pretrain.CheckpointFn(self._decoder, tokenizer, output)
        meanwhile()
        return write(step)


class _KilledError(Exception):
    """Stops a run from outside."""


@dataclass(eq=False)
class _Saved:
    """A tensor as automatic differentiation holds it."""

    tensor: torch.Tensor


def _keeping(held: "WeakSet[_Saved]") -> saved_tensors_hooks:
    """Inside the block `held` has the tensors that automatic differentiation holds."""

    def pack(tensor: torch.Tensor) -> _Saved:
        held.add(saved := _Saved(tensor.detach()))
        return saved

    return saved_tensors_hooks(pack, lambda saved: saved.tensor)


@contextmanager
def _only_read(folder: Path) -> Iterator[None]:
    """Inside the block the process has no right to write to the files of that folder, which root has of all."""
    real = io.open

    def opened(file: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        if not isinstance(file, int) and set(mode) & set("+awx") and folder in Path(file).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return real(file, mode, *given, **named)

    with opening(opened):
        yield


@contextmanager
def _before_a_lock(folder: Path, meanwhile: Callable[[], object]) -> Iterator[None]:
    """Inside the block something happens once, before a file in the folder is locked, by flock or lockf."""
    left = [meanwhile]

    def lock(real: Callable[..., None], file: Any, *given: Any) -> None:
        handle = file if isinstance(file, int) else file.fileno()
        if left and Path(f"/proc/self/fd/{handle}").resolve().is_relative_to(folder.resolve()):
            left.pop()()
        real(file, *given)

    locks: dict[str, Any] = {name: partial(lock, getattr(fcntl, name)) for name in ("flock", "lockf")}
    with mock.patch.multiple(fcntl, **locks):
        yield


def _is_free(output: Path) -> bool:
    """Whether another process could begin to write the folder now; a lock belongs to the file as it was opened."""
    with (output / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _batches(tokens: Tokens) -> TokenBatches:
    return TokenBatches(TokenShards(tokens.folder, tokens.vocab), batch=tokens.batch, seq=tokens.seq, seed=tokens.seed)


def _parameters(decoder: Decoder) -> Mapping[str, Array]:
    return {name: _copy(value.detach()) for name, value in decoder.named_parameters()}


def _copy(value: torch.Tensor) -> Array:
    return np.array(value.cpu())
