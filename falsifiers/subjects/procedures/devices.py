"""Devices, memory and non-finite values, as a subject runs them: names, sizes and seeds in, numbers out."""

import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.subjects.procedures.allocator import allocated
from blackswan.impl import checkpoint, classifier, device, ledger, memory, nonfinite, residency
from blackswan.impl.config import DecoderConfig
from blackswan.impl.decoder import random_tensors
from blackswan.impl.dispatch import replaced
from blackswan.impl.fused.memory import estimate_fused
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.trainer import Batch, Trainer
from blackswan.reference.table import Array

Scalars = Mapping[str, Any]
Outputs = dict[str, Array]
STEPS_AT_THE_PEAK = {"torch": 1, "fused": 3}
"""Of the hand-written layers the first captures their graph, and the next have the state of all before."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose(scalars: Scalars, _: torch.device) -> Outputs:
    """The device that `name` stands for on a host with `cards` CUDA devices: its kind as text, its index, and the number of warnings."""
    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch("torch.cuda.is_available", return_value=scalars["cards"] > 0),
        mock.patch("torch.cuda.device_count", return_value=scalars["cards"]),
    ):
        warnings.simplefilter("always")
        found = device.resolve_device(scalars["name"])
    return {"kind": _text(found.type), "index": np.asarray(found.index or 0), "warnings": np.asarray(len(caught))}


def prove(scalars: Scalars, place: torch.device) -> Outputs:
    """Proof of residency with the tensor `astray`, if any, on another device. An answer says that there was no objection."""
    trainer = _trainer(scalars, place)
    if scalars["astray"]:
        _move(trainer, scalars["astray"], torch.device("cpu" if place.type == "cuda" else "meta"))
    residency.require_residency(trainer.classifier, trainer.optimiser, place)
    return {"resident": np.asarray(1)}


def _move(trainer: Trainer, name: str, to: torch.device) -> None:
    owner, _, kind = name.rpartition(".")
    if owner == "optimiser":
        setattr(trainer.optimiser, kind, getattr(trainer.optimiser, kind).to(to))
        return
    module = trainer.classifier.get_submodule(owner)
    where: Any = module._parameters if kind in module._parameters else module._buffers
    moved = where[kind].detach().to(to)
    where[kind] = torch.nn.Parameter(moved, requires_grad=where[kind].requires_grad) if kind in module._parameters else moved


CARD = torch.device("cuda", 0)


def _ledger(scalars: Scalars) -> ledger.Ledger:
    """A ledger of a host whose cards have what the scalars say; without `cards` it is one."""
    cards = scalars.get("cards") or [{name: scalars[name] for name in ("free", "total")}]
    return ledger.Ledger(Path(scalars["folder"]), lambda at: ledger.DeviceMemory(f"card {at.index}", **cards[at.index]))


def reserve(scalars: Scalars, _: torch.device) -> Outputs:
    """A sequence of [verb, which, bytes, card]: for each whether it was refused, and what is reserved of each card after it."""
    book, held, refused, reserved = _ledger(scalars), {}, [], []
    keys = [f"card {index}" for index in range(len(scalars["cards"]))]
    for verb, which, count, card in scalars["sequence"]:
        try:
            if verb == "acquire":
                held[which] = book.acquire(torch.device("cuda", card), count)
            elif which in held and verb == "update":
                held[which].update(count)
            elif which in held:
                held.pop(which).release()
            refused.append(False)
        except ledger.InsufficientMemory:
            refused.append(True)
        entries = book.entries()
        reserved.append([sum(entry.bytes for entry in entries if entry.device == key) for key in keys])
    for reservation in held.values():
        reservation.release()
    return {"refused": np.asarray(refused), "reserved": np.asarray(reserved)}


def insufficient(scalars: Scalars, _: torch.device) -> Outputs:
    """`needed` bytes are reserved before a block that allocates; the file `allocated` says that it was entered."""
    with ledger.reserve(CARD, scalars["needed"], _ledger(scalars)):
        Path(scalars["allocated"]).touch()
    return {"accepted": np.asarray(1)}


def race(scalars: Scalars, _: torch.device) -> Outputs:
    """Processes that acquire and release at once: the largest sum held together, as they count it themselves, and how often each got it."""
    context = multiprocessing.get_context("fork")
    held, peak, gained, finished = (context.Value("q", 0) for _ in range(4))

    start = context.Barrier(scalars["processes"], timeout=30)

    def hold() -> None:
        book = _ledger(scalars)
        start.wait()
        for _ in range(scalars["rounds"]):
            try:
                reservation = book.acquire(CARD, scalars["bytes"])
            except ledger.InsufficientMemory:
                continue
            with held.get_lock():
                held.value += scalars["bytes"]
                peak.value = max(peak.value, held.value)
                gained.value += 1
            time.sleep(0.01)
            with held.get_lock():
                held.value -= scalars["bytes"]
            reservation.release()
        with finished.get_lock():
            finished.value += 1

    processes = [context.Process(target=hold) for _ in range(scalars["processes"])]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    left = sum(entry.bytes for entry in _ledger(scalars).entries())
    named = {"peak": peak.value, "gained": gained.value, "finished": finished.value, "left": left}
    return {name: np.asarray(value) for name, value in named.items()}


def die(scalars: Scalars, _: torch.device) -> Outputs:
    """What is reserved while a process holds memory, and after it was killed; then with an entry of an earlier process of a living id."""
    book = _ledger(scalars)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            book.acquire(CARD, scalars["bytes"])
            os.write(writing, b"held")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    os.read(reading, 4)
    os.close(reading)
    during = sum(entry.bytes for entry in book.entries())
    os.kill(child, signal.SIGKILL)
    after_kill = _settled(book, child)
    os.waitpid(child, 0)
    reservation = book.acquire(CARD, scalars["bytes"])
    path = Path(scalars["folder"]) / ledger.FILE
    path.write_text(json.dumps([{**entry, "started": "another boot/1"} for entry in json.loads(path.read_text())]))
    reused = sum(entry.bytes for entry in book.entries())
    reservation.release()
    named = {"during": during, "after_kill": after_kill, "reused": reused}
    return {name: np.asarray(value) for name, value in named.items()}


def _settled(book: ledger.Ledger, child: int) -> int:
    """What is reserved once the killed process has ended, whether or not its parent has taken note."""
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return sum(entry.bytes for entry in book.entries())


def estimate(scalars: Scalars, place: torch.device) -> Outputs:
    """The parts of the estimate for a training step by `engine`, and its total."""
    shape = {name: scalars[name] for name in ("batch", "seq", "accumulation")} | {"dtype": DTYPES[scalars["dtype"]]}
    if scalars["engine"] == "fused":
        found = estimate_fused(config_of(scalars), adaptation_of(scalars), **shape)
    else:
        found = memory.estimate(config_of(scalars), adaptation_of(scalars), device=place, **shape)
    return {f"parts/{name}": np.asarray(size) for name, size in found.parts.items()} | {"total": np.asarray(found.total)}


def measure(scalars: Scalars, place: torch.device) -> Outputs:
    """The peak of what the device's allocator gave out over loading and training by `engine`, and what autograd, where it is that engine,
    saved in a forward pass."""
    with allocated(place) as taken:
        trainer = _trainer(scalars, place)
        batch = _batch(scalars, place)
        for _ in range(STEPS_AT_THE_PEAK[scalars["engine"]]):
            if scalars["accumulation"] == 1:
                trainer.train_batch(batch)
                continue
            for _ in range(scalars["accumulation"]):
                trainer.accumulate(batch)
            trainer.apply()
    return {"peak": np.asarray(taken["peak"]), "saved": np.asarray(0 if scalars["engine"] == "fused" else _saved(trainer, batch))}


def _saved(trainer: Trainer, batch: Batch) -> int:
    kept = {value.untyped_storage()._cdata for value in (*trainer.classifier.parameters(), *trainer.classifier.buffers())}
    sizes: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in kept:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        trainer.classifier.loss(trainer.classifier(batch.input_ids, batch.mask), batch.labels)
    return sum(sizes.values())


def load(scalars: Scalars, place: torch.device) -> Outputs:
    """A checkpoint folder loaded into a classifier with NF4: peak and remaining bytes of the host's allocator, and what is stored of each
    projection."""
    files = [path.stat().st_size for path in Path(scalars["path"]).glob("*.safetensors")]
    with allocated(torch.device("cpu"), files) as taken:
        stored = checkpoint.load_checkpoint(Path(scalars["path"]))
        adaptation = classifier.Adaptation(2, 1, 2.0, nf4=True)
        trainable = classifier.initial_trainable(stored.config, adaptation, 0)
        made = classifier.Classifier(stored.config, adaptation, stored.tensors, trainable, dtype=torch.float32, device=place)
        del stored, trainable
    tensors = [*made.named_parameters(), *made.named_buffers()]
    absmax = {f"absmax/{name.removesuffix('.quantized.absmax')}": value.cpu().numpy() for name, value in tensors if name.endswith("absmax")}
    resident = sum(value.numel() * value.element_size() for _, value in tensors)
    named = {"peak": taken["peak"], "resident": resident}
    return {name: np.asarray(value) for name, value in named.items()} | absmax


def find(scalars: Scalars, place: torch.device) -> Outputs:
    """What `origin` says of a batch with a non-finite value planted, as text; and whether a weight or gradient is another than before.

    Parameters are searched in parts of `part` elements.
    """
    trainer = _trainer(scalars, place)
    batch = _batch(scalars, place)
    with _planted(trainer, scalars), mock.patch.object(nonfinite, "_PART", scalars["part"]):
        before = _content(trainer)
        found = nonfinite.origin(trainer.classifier, batch)
        changed = _content(trainer) != before or any(value.grad is not None for value in trainer.classifier.parameters())
    return {"origin": _text(found or ""), "changed": np.asarray(int(changed))}


def stop(scalars: Scalars, place: torch.device) -> Outputs:
    """Whether a training step by `engine` with a non-finite value planted is stopped, and whether anything is another than before."""
    trainer = _trainer(scalars, place)
    batch = _batch(scalars, place)
    trainer.train_batch(batch)
    with _planted(trainer, scalars):
        before = _content(trainer)
        try:
            trainer.train_batch(batch)
            stopped = 0
        except (ValueError, FloatingPointError):
            stopped = 1
        changed = _content(trainer) != before
    return {"stopped": np.asarray(stopped), "changed": np.asarray(int(changed))}


@contextmanager
def _planted(trainer: Trainer, scalars: Scalars) -> Iterator[None]:
    """A bad value in a parameter (its last number, which of the head's bias is a class that no label names), or in the output or the
    passed gradient of the `nth` call of an operation in each forward pass."""
    bad, where = float(scalars["value"]), scalars["where"]
    if where == "parameter":
        with torch.no_grad():
            trainer.classifier.get_parameter(scalars["parameter"]).view(-1)[-1] = bad
    if where not in ("output", "gradient"):
        yield
        return
    operation, nth = scalars["operation"], scalars["nth"]
    correct, calls = OPERATIONS[operation], iter(range(10**9))
    spoil: Callable[[Tensor, float], Tensor] = _spoiled if where == "output" else _Spoiled.apply

    def planted(**arguments: Any) -> Any:
        if next(calls) % scalars["calls"] != nth:
            return correct(**arguments)
        if where == "output":
            return spoil(correct(**arguments), bad)
        name = next(name for name, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad)
        return correct(**{**arguments, name: spoil(arguments[name], bad)})

    with replaced({operation: planted}):
        yield


def _spoiled(value: Tensor, bad: float) -> Tensor:
    moved = value.clone()
    moved.view(-1)[0] = bad
    return moved


class _Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, bad: float) -> Tensor:
        ctx.bad = bad
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        return _spoiled(cotangents[0].contiguous(), ctx.bad), None


def sync(scalars: Scalars, place: torch.device) -> Outputs:
    """The classifier's tensors put on the device and read back; and the trained ones after a step, from the model and from its state."""
    config, adaptation = config_of(scalars), adaptation_of(scalars)
    drawn = random_tensors(config, scalars["seed"]) | _trainable(scalars)
    base = {name: value for name, value in drawn.items() if name in classifier.base_shapes(config)}
    trainable = {name: value for name, value in drawn.items() if name not in base}
    dtype = DTYPES[scalars["dtype"]]
    trainer = Trainer(
        classifier.Classifier(config, adaptation, base, trainable, dtype=dtype, device=place),
        total_steps=None,
        micro_batch=4,
        learning_rate=1e-2,
    )
    found = {f"sent/{name}": drawn[name].to(dtype if name in base else torch.float32) for name in drawn}
    found |= {f"held/{name}": value.detach().cpu().clone() for name, value in trainer.classifier.named_parameters()}
    trainer.train_batch(_batch(scalars, place))
    found |= {f"trained/{name}": value.detach().cpu() for name, value in trainer.classifier.trainable_parameters().items()}
    state = {name: value.cpu() for name, value in trainer.state().items() if name.startswith("trainable/")}
    return {name: value.float().numpy() for name, value in (found | state).items()}


def config_of(scalars: Scalars) -> DecoderConfig:
    """The architecture of the scalars' sizes."""
    sizes = {name: scalars[name] for name in ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")}
    return DecoderConfig(scalars["family"], **sizes, eps=1e-6, theta=1e4, tied=True, max_positions=2**20)


def adaptation_of(scalars: Scalars) -> classifier.Adaptation:
    """What the scalars add to the decoder, with alpha twice the rank."""
    return classifier.Adaptation(scalars["classes"], scalars["rank"], 2.0 * scalars["rank"], scalars["targets"], nf4=scalars["nf4"])


def _trainable(scalars: Scalars) -> dict[str, Tensor]:
    """Start values with a B that is not zero, so that every tensor has a content."""
    generator = torch.Generator().manual_seed(scalars["seed"])
    found = classifier.initial_trainable(config_of(scalars), adaptation_of(scalars), scalars["seed"])
    return {name: value + 0.01 * torch.randn(value.shape, generator=generator) for name, value in found.items()}


def classifier_on(scalars: Scalars, place: torch.device) -> classifier.Classifier:
    """A classifier of random weights on the device."""
    config, tensors = config_of(scalars), random_tensors(config_of(scalars), scalars["seed"])
    dtype = DTYPES[scalars["dtype"]]
    return classifier.Classifier(config, adaptation_of(scalars), tensors, _trainable(scalars), dtype=dtype, device=place)


def _trainer(scalars: Scalars, place: torch.device) -> Trainer:
    return trainer_by(scalars["engine"], classifier_on(scalars, place), scalars["batch"], scalars["seq"])


def trainer_by(engine: str, made: classifier.Classifier, micro_batch: int, longest: int) -> Trainer:
    """A trainer by automatic differentiation (`torch`), or by the hand-written layers (`fused`)."""
    settings: dict[str, Any] = {"total_steps": None, "micro_batch": micro_batch, "learning_rate": 1e-3}
    return FusedTrainer(made, longest=longest, **settings) if engine == "fused" else Trainer(made, **settings)


def _batch(scalars: Scalars, place: torch.device) -> Batch:
    """No label is the last class."""
    generator = torch.Generator().manual_seed(scalars["seed"])
    ids = torch.randint(0, scalars["vocab"], (scalars["batch"], scalars["seq"]), generator=generator)
    labels = torch.randint(0, scalars["classes"] - 1, (scalars["batch"],), generator=generator)
    return Batch(ids.to(place), torch.ones_like(ids, dtype=torch.bool).to(place), labels.to(place))


def _content(trainer: Trainer) -> Sequence[bytes]:
    tensors = (*trainer.classifier.parameters(), *trainer.classifier.buffers(), trainer.optimiser.exp_avg, trainer.optimiser.exp_avg_sq)
    return [value.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for value in tensors]


def _text(value: str) -> Array:
    return np.frombuffer(value.encode(), np.uint8)


PROCEDURES: dict[str, Callable[[Scalars, torch.device], Outputs]] = {
    "choose_device": choose,
    "prove_residency": prove,
    "reserve_memory": reserve,
    "refuse_memory": insufficient,
    "race_for_memory": race,
    "die_holding_memory": die,
    "estimate_memory": estimate,
    "measure_memory": measure,
    "load_quantised": load,
    "find_nonfinite": find,
    "stop_at_nonfinite": stop,
    "sync_to_host": sync,
}
