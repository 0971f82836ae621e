"""Devices, and trainers on them, as `impl` chooses and makes them."""

import importlib
import io
import itertools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from blackswan.falsifiers.subjects.conversion import adaptation_of, config_of, to_numpy
from blackswan.falsifiers.subjects.doors.devices import TABLE, Chosen, OnCards, Plant, Workload
from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.impl.blocks import KINDS, Block, backends_after_estimates, settings_after_imports
from blackswan.falsifiers.subjects.impl.hand_written import Steps
from blackswan.falsifiers.subjects.impl.large import changed_when_repeated, last_rows
from blackswan.falsifiers.subjects.impl.many_rows import many_rows
from blackswan.falsifiers.subjects.impl.openings import Opening
from blackswan.falsifiers.subjects.impl.watching import broken_off
from blackswan.falsifiers.subjects.patching import opening
from blackswan.falsifiers.subjects.protocol import Lacks, Session
from blackswan.impl import device, dispatch, kernels, nonfinite, residency
from blackswan.impl.classifier import Classifier, trainable_shapes
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.dispatch import replaced
from blackswan.impl.fused import products, step
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.trainer import Batch, Trainer
from blackswan.reference.table import Array


@contextmanager
def _host(said: Path) -> Iterator[None]:
    """Inside the block the system says what stands in that folder; of its pages, if it says anything, the numbers in the file `pages`."""
    real, stat = io.open, os.stat
    there = {"/proc/meminfo": "meminfo", "/proc/self/cgroup": "cgroup", "/sys/fs/cgroup": "groups"}

    def elsewhere(file: Any) -> Any:
        name = next((place for place in there if str(file).startswith(place)), None)
        return file if name is None else f"{said / there[name]}{str(file).removeprefix(name)}"

    def opened(file: Any, *given: Any, **named: Any) -> Any:
        return real(elsewhere(file), *given, **named)

    looked_at = mock.patch.object(os, "stat", lambda file, *given, **named: stat(elsewhere(file), *given, **named))

    pages = said / "pages"
    counted = mock.patch.object(os, "sysconf", json.loads(pages.read_text()).__getitem__) if pages.exists() else nullcontext()
    with opening(opened), looked_at, counted:
        yield


class Devices(Door):
    """Devices by their names, and trainers on them."""

    def resolve(self, name: str) -> str:
        """The device of a name in the grammar cpu | auto | KIND | KIND:N."""
        return str(device.resolve_device(name))

    def choose(self, name: str, present: Mapping[str, int], unusable: int = 0) -> Chosen:
        """The device that a name gives on a host with so many devices of each kind: torch is made to say that they are there.

        Of CUDA's cards its driver may list so many that CUDA cannot use, where it can use none.
        """
        cards, others = present.get("cuda", 0) + present.get("hip", 0), [kind for kind in present if kind not in ("cuda", "hip")]
        other = others[0] if others else "cuda"
        with (
            mock.patch("torch.version.hip", "6.0" if "hip" in present else None),
            mock.patch("torch.accelerator.current_accelerator", return_value=torch.device(other) if cards or others else None),
            mock.patch("torch.accelerator.is_available", return_value=bool(cards or others)),
            mock.patch("torch.accelerator.device_count", return_value=present.get(other, cards)),
            warnings.catch_warnings(record=True) as caught,
            mock.patch("torch.cuda.is_available", return_value=cards > 0),
            mock.patch("torch.cuda.device_count", return_value=cards or unusable),
        ):
            warnings.simplefilter("always")
            products = torch.backends.cuda.matmul
            before = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
            products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
            try:
                found = device.resolve_device(name)
                narrow = products.allow_bf16_reduced_precision_reduction or products.allow_fp16_reduced_precision_reduction
            finally:
                products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = before
        number = 0 if found.type == "cpu" else -1 if found.index is None else found.index  # without one it would be the current card
        return Chosen(found.type, number, len(caught), found.type == "cuda" and bool(narrow))

    def attend(self, batch: int, seq: int, heads: int, said: Path) -> Array:
        """Attention over so many texts of so many tokens, by heads of two, on a host whose system says in that folder what memory it has:
        `meminfo`, `cgroup` and `groups`; of few tokens too."""
        x, mask = torch.ones(batch, seq, heads, 2), torch.ones(batch, seq, dtype=torch.bool)
        operation = sys.modules[OPERATIONS["attention"].__module__]
        with _host(said), mock.patch.object(operation, "LITTLE", 0):
            return to_numpy(OPERATIONS["attention"](x, x, x, mask))

    def attend_long(self, seq: int, said: Path) -> None:
        """Attention over a text of so many tokens on a host that says that of its memory. Torch is replaced, so that an attention that does
        not refuse first ends with an AttributeError instead of taking gigabytes."""
        x, mask = torch.ones(1).expand(1, seq, 1, 2), torch.ones(1, dtype=torch.bool).expand(1, seq)
        operation, nothing = sys.modules[OPERATIONS["attention"].__module__], SimpleNamespace(float32=torch.float32)
        with _host(said), mock.patch.object(operation, "torch", nothing):
            OPERATIONS["attention"](x, x, x, mask)

    def trainer(self, work: Workload, weights: Mapping[str, Array]) -> "PlacedTrainer":
        """A trainer that starts from those float32 weights."""
        return PlacedTrainer(work, weights, self._device)

    def steps(self, work: Workload, weights: Mapping[str, Array], settings: Mapping[str, Any], plain: bool = True) -> Steps:
        """Steps by the backend, with the trainer's own settings; on a CPU `plain`, without Triton's interpreter."""
        return Steps(work, weights, settings, self._device, plain)

    def on_cards(self, work: Workload, weights: Mapping[str, Array], lengths: Sequence[int], cards: tuple[int, int, int]) -> OnCards:
        """Trainers work on the first of these cards, which are not here, while the second is the current one; the third is used once.

        There are steps on batches of so many tokens a sample, each a second time after the third card was used and memory was estimated.
        """
        if missing := kernels.missing():
            raise Lacks(missing)
        from blackswan.falsifiers.subjects.impl.other_cards import on_cards  # imports Triton

        return on_cards(work, weights, lengths, cards)

    def backend(self, kind: str, architecture: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[bool, str | None]:
        """Whether a run on a device of that kind would use the hand-written layers, and the reason where it would not on a GPU.

        The question assumes that their kernels run there. Raises a ValueError where the layers were asked for and cannot be used.
        """
        runs = mock.patch("blackswan.impl.kernels.why_not", return_value=None)
        with runs, mock.patch("blackswan.impl.kernels.interpreted", return_value=False):
            return step.backend_of(ClassifyConfig(**settings), config_of(architecture), torch.device(kind))

    def backend_of_opened(self, kind: str, architecture: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        """Asks a saved adapter that is opened again whether its steps would use the hand-written layers on a device of that kind."""
        with TemporaryDirectory() as parent:
            fresh = ClassifyPipeline.from_random(config_of(architecture), ClassifyConfig(**settings), device="cpu")
            fresh.save(Path(parent) / "adapter")
            opened = ClassifyPipeline.from_saved(Path(parent) / "adapter", device="cpu")
        runs = mock.patch("blackswan.impl.kernels.why_not", return_value=None)
        with runs, mock.patch("blackswan.impl.kernels.interpreted", return_value=False):
            opened.device = torch.device(kind)
            return opened._backend()[0]

    def kernels_run(self, card: bool, interpret: str | None, error: ImportError | None) -> str | None:
        """Why kernels cannot run on a host with a card or none, with that for TRITON_INTERPRET; an import of Triton ends in the error."""
        with (
            mock.patch.dict(os.environ, {} if interpret is None else {"TRITON_INTERPRET": interpret}),
            mock.patch("torch.cuda.is_available", return_value=card),
            mock.patch.object(importlib, "import_module", side_effect=error),
        ):
            if interpret is None:
                os.environ.pop("TRITON_INTERPRET", None)
            cached = [each for each in (kernels.missing, kernels._has_cuda) if hasattr(each, "cache_clear")]
            for each in cached:
                each.cache_clear()
            try:
                return kernels.why_not()
            finally:
                for each in cached:
                    each.cache_clear()

    def tiles(self, head_dim: int, dtype: str) -> dict[str, tuple[int, int, int]]:
        """By kernel of attention the tokens of a tile that stays, those of one that is loaded, and loads in flight; none without Triton."""
        if kernels.missing():
            return {}
        from blackswan.impl.kernels import attention  # imports Triton

        x = torch.empty(0, 1, head_dim, dtype=getattr(torch, dtype))
        tables = {"forward": attention.FORWARD, "query gradient": attention.QUERY_GRADIENT, "key gradient": attention.KEY_GRADIENT}
        found = {name: attention._blocks(table, x) for name, table in tables.items()}
        order = {name: (each.keys, each.queries) if "key" in name else (each.queries, each.keys) for name, each in found.items()}
        return {name: (*order[name], each.stages) for name, each in found.items()}

    def programs(self, tokens: int) -> list[tuple[str, int, int]]:
        """By kernel and axis the programs that are launched for so many tokens, without running one; none without Triton."""
        if kernels.missing():
            return []
        from blackswan.falsifiers.subjects.impl.kernel_calls import programs  # imports Triton

        return programs(tokens)

    def last_rows(self) -> list[tuple[str, Array, Array]]:
        """Runs each kernel on more than 2³¹ elements, on a GPU: the last rows of its outputs, and what it gives for these alone."""
        return list(last_rows(self._device))

    def changed_when_repeated(self) -> dict[str, int]:
        """By kernel and output, how often a computation that is repeated gives another bit."""
        return changed_when_repeated(self._device)

    def fastest(self, gives: Sequence[str], times: Sequence[float]) -> int:
        """The number of the algorithm that is chosen for a product, of those that give the `same` bits, `other` ones or `none`, or `fail`.

        The first is the standard one. `times` are how long each takes.
        """
        out, expected = torch.zeros(3), torch.ones(3)
        numbers: dict[Callable[[], object], int] = {partial(_product, each, out): number for number, each in enumerate(gives)}

        def timed(calls: Sequence[Callable[[], object]]) -> list[float]:
            for call in calls:
                call()
            return [times[numbers[call]] for call in calls]

        return products.fastest_of(list(numbers), expected, out, timed)

    def product_after(self, error: Exception) -> bool:
        """Whether a product has the bits of torch's own where the library's description of it ends with an error."""
        a = torch.ones(3, 2, dtype=torch.bfloat16).as_subclass(_OnCard)
        tuned = products.Products()
        with mock.patch.object(products, "Product", side_effect=error):
            tuned.tune(a, a.T)
        return torch.equal(tuned.mm(a, a.T), torch.mm(a, a.T))

    def tuned_products(self) -> dict[str, tuple[Array, Array]]:
        """Products of operands of each form by torch, and by tuned products of which one form was tuned, with an algorithm for no other.

        Results are read when all are there.
        """
        generator, found = torch.Generator().manual_seed(0), dict[str, tuple[Array, Array]]()
        wide, b, bias = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((4, 8), (4, 4), (4,)))
        a = wide[:, :4].contiguous()
        forms: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {
            "plain": (a, b, None),
            "transposed": (a, b.T, None),
            "biased": (a, b, bias),
            "in wider rows": (wide[:, :4], b, None),
        }
        forms |= {"of other numbers": (-a, b, None), "of float16": (a.half(), b.half(), None), "of fewer rows": (a[:3], b, None)}
        for name, form in forms.items():
            tuned = products.Products()
            with mock.patch.multiple(products, Product=_OfOneForm, fastest_of=lambda *_: 1):
                tuned.tune(form[0].as_subclass(_OnCard), *form[1:])
            given = {other: tuned.mm(*operands) for other, operands in forms.items()}
            for other, (left, right, added) in forms.items():
                expected = torch.mm(left, right) if added is None else torch.addmm(added, left, right)
                found[f"{other}, where {name} was tuned"] = to_numpy(expected.double()), to_numpy(given[other].double())
        return found

    def backends(self, operation: str) -> list[str]:
        """What can compute an operation here."""
        return ["torch", *(["triton"] if operation in kernels.NAMES and kernels.why_not() is None else [])]

    def operate(self, operation: str, arguments: Mapping[str, Any], backend: str) -> list[Array]:
        """What an operation makes of arrays and plain values, by that backend."""
        given = {name: torch.tensor(value, device=self._device) if np.ndim(value) else value for name, value in arguments.items()}
        with dispatch.backend(backend):
            result = dispatch.call(operation, operation, **given)
        return [to_numpy(each) for each in (result if isinstance(result, tuple) else (result,))]

    def operate_again(self, operation: str, first: Mapping[str, Any], then: Mapping[str, Any], backend: str) -> list[Array]:
        """What it makes of arrays that lie where those did that it was asked about first, if they are of the same shape and dtype."""
        given = {name: torch.tensor(value, device=self._device) if np.ndim(value) else value for name, value in first.items()}
        with dispatch.backend(backend):
            dispatch.call(operation, operation, **given)
            for name, value in then.items():
                new, held = torch.tensor(value, device=self._device) if np.ndim(value) else value, given.get(name)
                if isinstance(held, Tensor) and (held.shape, held.dtype) == (new.shape, new.dtype):
                    new = held.copy_(new)
                given[name] = new
            result = dispatch.call(operation, operation, **given)
        return [to_numpy(each) for each in (result if isinstance(result, tuple) else (result,))]

    def many_rows(self) -> Iterator[tuple[str, Array, Array]]:
        """Results and gradients of operations on many rows by torch on the CPU: as a few rows give them, and as they are."""
        return many_rows()

    @property
    def block_kinds(self) -> tuple[str, ...]:
        """The kinds of block inside which something holds for a program."""
        return KINDS

    def block(self, kind: str, folder: Path) -> Block:
        """Blocks of that kind, to be entered one within another; some are about a folder."""
        return Block(kind, folder)

    def settings_after_imports(self) -> dict[str, bool]:
        """Whether torch's compiler and what is logged are as before when a library was imported that is there, when one is missing, and
        when two threads imported it."""
        return settings_after_imports()

    def backends_after_estimates(self) -> dict[str, list[dict[str, str]]]:
        """By each backend that is chosen, what two kinds of device compute with before an estimate and after each of two, of which the last
        one fails."""
        return backends_after_estimates()

    def opening(self, work: Workload, kind: str, **settings: Any) -> Opening:
        """A classifier or a decoder that is to be opened."""
        return Opening(work, kind, self._device, settings)


class PlacedTrainer(Session):
    """A trainer whose tensors are on the device, with one batch."""

    def __init__(self, work: Workload, weights: Mapping[str, Array], place: torch.device) -> None:
        self._place, self._planted = place, dict[str, Callable[..., Any]]()
        tensors = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
        trained = {name: tensors.pop(name) for name in trainable_shapes(config_of(work.scalars), adaptation_of(work.scalars))}
        self._trainer = trainer_of(work, tensors, trained, place)
        self._batch = batch_of(work, place)

    def content(self) -> dict[str, bytes]:
        """The bytes of each parameter and buffer and of the optimiser's moments (`optimiser.exp_avg`, `optimiser.exp_avg_sq`), by name."""
        model, optimiser = self._trainer.classifier, self._trainer.optimiser
        moments = {f"optimiser.{name}": getattr(optimiser, name) for name in ("exp_avg", "exp_avg_sq")}
        return _bytes({**dict(model.named_parameters()), **dict(model.named_buffers()), **moments})

    def reported(self) -> dict[str, bytes]:
        """The trained parameters as the trainer's state reports them, which checkpoints are made of."""
        state = self._trainer.state().items()
        return _bytes({name.removeprefix("trainable/"): value for name, value in state if name.startswith("trainable/")})

    def gradients(self) -> list[str]:
        """The parameters that have a gradient."""
        return [name for name, value in self._trainer.classifier.named_parameters() if value.grad is not None]

    def move(self, name: str) -> None:
        """Puts that tensor of `content`, the gradient of a parameter, a parameter as the optimiser knows it, or a new buffer that no file
        would have (`TABLE`), on another device: the CPU from a GPU, no device (meta) from elsewhere."""
        to = torch.device("cpu" if self._place.type == "cuda" else "meta")
        optimised = self._trainer.optimiser.parameters
        if name.startswith("the gradient of "):  # torch gives a parameter none of another device, unless it is moved itself
            gradient = torch.zeros_like(optimised[name.removeprefix("the gradient of ")], device=to, requires_grad=False)
            optimised[name.removeprefix("the gradient of ")].__class__ = type("Moved", (torch.nn.Parameter,), {"grad": gradient})
            return
        if name.startswith("optimiser.parameters"):
            known = name.split("'")[1]
            optimised[known] = torch.nn.Parameter(optimised[known].detach().to(to))
            return
        owner, _, kind = name.rpartition(".")
        if owner == "optimiser":
            setattr(self._trainer.optimiser, kind, getattr(self._trainer.optimiser, kind).to(to))
            return
        module = self._trainer.classifier.get_submodule(owner)
        if kind == TABLE:
            module.register_buffer(kind, torch.zeros(1, device=to), persistent=False)
        elif kind in module._parameters:
            before = module.get_parameter(kind)
            module._parameters[kind] = torch.nn.Parameter(before.detach().to(to), requires_grad=before.requires_grad)
        else:
            module._buffers[kind] = module.get_buffer(kind).to(to)

    def join_trained(self) -> None:
        """Makes the trained parameters views of one vector, as the hand-written layers have them."""
        trained = list(self._trainer.classifier.trainable_parameters().values())
        joined = torch.cat([value.detach().flatten() for value in trained])
        for value, own in zip(trained, torch.split(joined, [value.numel() for value in trained]), strict=True):
            value.data = own.view_as(value)

    def require_resident(self, current: int | None = None) -> None:
        """The subject's own proof that all is on the device, or on CUDA's current one, which is of that number and need not be here.

        Raises NotResident where a tensor is not."""
        place = self._place if current is None else torch.device("cuda")
        with nullcontext() if current is None else mock.patch("torch.cuda.current_device", return_value=current):
            residency.require_residency(self._trainer.classifier, self._trainer.optimiser, place)

    def require_on_card(self, used: int, asked: int, allocated: Mapping[int, int]) -> None:
        """The same proof of card `asked`, where all tensors say that they are on card `used`, on a host on whose cards, by their numbers,
        this process has allocated so many bytes; the current card is another one. Raises NotResident."""
        from blackswan.falsifiers.subjects.impl.feigned import Cards

        current = max(used, asked) + 1

        def of_card(place: torch.device | int | None = None) -> int:
            return allocated.get(current if place is None else torch.device(place).index, 0)

        with mock.patch("torch.cuda.memory_allocated", of_card), Cards(used, current, {}):
            residency.require_residency(self._trainer.classifier, self._trainer.optimiser, torch.device("cuda", asked))

    def plant(self, plant: Plant) -> None:
        """Spoils the parameter, or every forward pass from here on."""
        if plant.where == "parameter":
            model = self._trainer.classifier
            with torch.no_grad():
                {**dict(model.named_parameters()), **dict(model.named_buffers())}[plant.name].view(-1)[[0, -1] if plant.both else -1] = (
                    plant.value
                )
        else:
            self._planted[plant.name] = _spoiling(plant)

    def step(self) -> None:
        """A training step on the batch."""
        with replaced(self._planted):
            self._trainer.train_batch(self._batch)

    def step_late(self, late: str) -> None:
        """A step through the hand-written layers, of whose streams one is late: `main` or `side`, or none; or while another `thread` uses
        the GPU."""
        from blackswan.falsifiers.subjects.impl.late import late_stream  # imports Triton

        with late_stream(late, self._place):
            self._trainer.train_batch(self._batch)

    def freed_too_soon(self) -> list[str]:
        """A step through the hand-written layers; which operations beside the products read a tensor that was gone too soon."""
        from blackswan.falsifiers.subjects.impl.late import freed_too_soon  # imports Triton

        with freed_too_soon(self._place) as freed:
            self._trainer.train_batch(self._batch)
        return freed

    def origin(self, part: int, class_weights: Array | None = None, labels: Array | None = None) -> str | None:
        """Says where a value that is not finite comes from, in a program that has switched gradients off; parameters are searched `part`
        numbers at a time. `labels` are several a sample, in place of the batch's own."""
        weights, given = (None if each is None else torch.from_numpy(each.copy()).to(self._place) for each in (class_weights, labels))
        batch = self._batch if given is None else replace(self._batch, labels=given)
        with replaced(self._planted), mock.patch.object(nonfinite, "_PART", part), torch.no_grad():
            return nonfinite.origin(self._trainer.classifier, batch, weights)

    def origin_broken_off(self, operation: str, error: str) -> str | None:
        """The answer of that search, in which an operation or its backward pass fails, or the name of the error that it ends in."""
        answers = list[str | None]()
        return broken_off(lambda: answers.append(self.origin(self._batch.input_ids.numel())), operation, 0, error) or answers[0]


class _OnCard(Tensor):
    """A tensor of the CPU that says that it is on a card."""

    is_cuda = True


class _OfOneForm:
    """Stands for the library's product, and gives no number for operands of another form than the constructor's."""

    algorithms = 1

    def __init__(self, *operands: Tensor | None) -> None:
        self._form = self._form_of(operands)

    def run(self, algorithm: int, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Torch's own product."""
        del algorithm
        right = torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
        out.copy_(right if self._form_of((a, b, bias)) == self._form else torch.full_like(right, torch.nan))

    def _form_of(self, operands: Sequence[Tensor | None]) -> object:
        return [None if value is None else (value.shape, value.stride(), value.dtype) for value in operands]


def _product(gives: str, out: Tensor) -> None:
    if gives == "fail":
        raise RuntimeError("no algorithm for this product")
    if gives == "none":
        return
    out.copy_(torch.ones(3) if gives == "same" else torch.tensor([1.0, 1.0, 1.0 + 2**-23]))


def _bytes(tensors: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {name: value.detach().flatten().view(torch.uint8).cpu().numpy().tobytes() for name, value in tensors.items()}


def _spoiling(plant: Plant) -> Callable[..., Any]:
    correct, calls = OPERATIONS[plant.name], itertools.count()

    def planted(**arguments: Any) -> Any:
        if next(calls) % plant.calls != plant.nth:
            return correct(**arguments)
        if plant.where == "output":
            return _spoiled(correct(**arguments), plant.value)
        name = next(name for name, value in arguments.items() if isinstance(value, Tensor) and value.requires_grad)
        return correct(**{**arguments, name: _Spoiled.apply(arguments[name], plant.value)})  # type: ignore[no-untyped-call]  # torch

    return planted


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


def trainer_of(work: Workload, base: Mapping[str, Tensor], trained: Mapping[str, Tensor], place: torch.device) -> Trainer:
    """A trainer of those weights on the device, by the backend."""
    made = Classifier(config_of(work.scalars), adaptation_of(work.scalars), base, trained, dtype=getattr(torch, work.dtype), device=place)
    settings: dict[str, Any] = {"total_steps": None, "micro_batch": work.micro or work.batch, "learning_rate": 1e-3}
    return FusedTrainer(made, longest=work.seq, **settings) if work.backend == "fused" else Trainer(made, **settings)


def batch_of(work: Workload, place: torch.device, length: int | None = None) -> Batch:
    """The batch, with so many real tokens in each sample where not all are real."""
    generator = torch.Generator().manual_seed(work.seed)
    ids = torch.randint(0, work.vocab, (work.batch, work.seq), generator=generator)
    mask = torch.arange(work.seq).expand_as(ids) < (length or work.seq)
    labels = torch.randint(0, work.classes - 1, (work.batch,), generator=generator)
    return Batch(ids.to(place), mask.to(place), labels.to(place))
