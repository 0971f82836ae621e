"""Memory of devices as `impl` reserves, estimates and takes it."""

import gc
import json
import math
import tempfile
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.subjects.conversion import adaptation_of, config_of
from blackswan.falsifiers.subjects.doors.devices import Estimate, Growth, Quantised, Usage, Workload
from blackswan.falsifiers.subjects.impl import Door
from blackswan.falsifiers.subjects.impl.allocator import allocated
from blackswan.falsifiers.subjects.impl.devices import batch_of, trainer_of
from blackswan.falsifiers.subjects.impl.slow_disk import held_by_then, slow
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.impl import adapter, allocations, apr_write, checkpoint, classifier, dispatch, group, kernels, memory, merge, nonfinite
from blackswan.impl import fit as whole_runs
from blackswan.impl.commands import common
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.fused import memory as fused_memory
from blackswan.impl.fused.packing import pack
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.tensors import LazyTensors, Shapes, shapes_of
from blackswan.impl.trainer import Batch, Trainer


class Memory(Door):
    """Memory of devices. Lacks where the bytes of a kind of device are not known."""

    def require_kernels(self) -> None:
        """Lacks where the kernels by which a GPU's memory is estimated are not installed."""
        if missing := kernels.missing():
            raise Lacks(f"the estimate for a GPU counts what the kernels allocate there: {missing}")

    def estimate(
        self, work: Workload, kind: str | None = None, *, as_text: bool = True, multi_label: bool = False, by: str = "auto"
    ) -> Estimate:
        """Estimates a step on a device of that name, which is not here, or on the subject's own; by the fused backend on CUDA, else inside
        that choice of operations."""
        model = config_of(work.scalars), adaptation_of(work.scalars), work.batch, work.seq, getattr(torch, work.dtype)
        if work.backend == "fused":
            found = fused_memory.estimate_fused(*model, accumulation=work.accumulation, multi_label=multi_label)
        else:
            chosen = nullcontext() if by == "auto" else dispatch.backend(by)  # a user who has no choice makes none
            with mock.patch("torch.cuda.is_available", return_value=False) if kind else nullcontext(), chosen:
                named = kind if kind is None or as_text else torch.device(kind)
                settings: dict[str, Any] = {"accumulation": work.accumulation, "multi_label": multi_label}
                found = memory.estimate(*model, **settings, device=named or self._device)
        return Estimate(dict(found.parts), found.total, found.resident)

    def totals_by_surroundings(self, work: Workload) -> dict[str, int]:
        """Estimates of several labels a sample, where a user has set the default dtype of torch or switched gradients off."""
        before = torch.get_default_dtype()
        found = {"alone": self.estimate(work, multi_label=True).total}
        for name, inside in (("no_grad", torch.no_grad()), ("inference_mode", torch.inference_mode())):
            with inside:
                found[name] = self.estimate(work, multi_label=True).total
        try:
            torch.set_default_dtype(torch.float64)
            return {**found, "float64": self.estimate(work, multi_label=True).total}
        finally:
            torch.set_default_dtype(before)

    def tokens_of_a_step(self, work: Workload) -> tuple[int, int]:
        """So many tokens a micro-batch has in an estimate of the hand-written layers, and where a step packs its whole samples."""
        counted, packed = list[int](), fused_memory._Step._packed

        def noted(step: Any, *given: Any) -> Any:
            found = packed(step, *given)
            counted.append(len(found.input_ids))
            return found

        with mock.patch("blackswan.impl.fused.memory._Step._packed", noted):
            self.estimate(replace(work, backend="fused"))
        ids = torch.zeros(work.batch, work.seq, dtype=torch.int64)
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), ids[:, 0])
        return max(counted), len(pack(batch, work.batch, ids.numel()).input_ids)

    def counted_by(self, kind: str, choice: str, triton: bool, card: bool) -> tuple[str, str]:
        """By whose operations an estimate for that device counts inside a choice of backend, on a host with Triton or without, with a card
        or without; and what a summary says that a run there computes them by."""
        why = None if triton else "Triton cannot be imported"
        host = mock.patch.multiple(kernels, missing=lambda: why, _has_cuda=lambda: card, interpreted=lambda: False)
        with host, dispatch.backend(choice):
            said = dispatch.describe_backend(torch.device(kind))
            with dispatch.without_content(torch.device(kind)):
                return dispatch.backend_on(torch.device("meta")), said

    def workspaces(self, kind: str, capabilities: Sequence[int]) -> int:
        """What the libraries take on that device, on a host whose cards have those major compute capabilities, the first one current."""
        counted = allocations.Allocations(memory.META)
        with _cards_of(capabilities):
            return memory.estimate_of(counted, torch.device(kind)).total

    def counted(self, device: str) -> list[int]:
        """The peaks that are counted of some passes of two layers over [batch, seq, hidden], forward alone and with the backward pass, with
        content on `cpu` or without on `meta`."""
        x, *weights = (torch.ones(shape, device=device) for shape in ((3, 5, 8), (16, 8), (64, 16)))
        peaks = list[int]()
        for trained in (False, True):
            with allocations.Allocations(device, 1) as taken:
                for _ in range(3):
                    y = torch.nn.functional.silu(x @ weights[0].requires_grad_(trained).T)
                    loss = torch.nn.functional.linear(y, weights[1].requires_grad_(trained)).square_().mean()
                    if trained:
                        torch.autograd.grad(loss, weights)
            peaks.append(int(taken.peak))
        return peaks

    def of_a_run(
        self, samples: int, settings: Mapping[str, Any], longest: int = 8, kind: str | None = None, capabilities: Sequence[int] = ()
    ) -> int:
        """Estimates a run's steps on so many samples, the longest of so many tokens, as the command does before it starts: of a model of
        one layer of the shipped checkpoint's, on the subject's device or on one of that name, where kernels run; of a host that has cards
        of such major compute capabilities, the first one current, where these are named."""
        feigned = mock.patch.multiple("blackswan.impl.kernels", why_not=lambda: None, interpreted=lambda: False) if kind else nullcontext()
        with tempfile.TemporaryDirectory() as folder, feigned, _cards_of(capabilities) if capabilities else nullcontext():
            shipped, one = json.loads((CHECKPOINT / "config.json").read_text()), {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
            (Path(folder) / "config.json").write_text(json.dumps(shipped | one))
            return common.memory_of_a_step(Path(folder), ClassifyConfig(**settings), samples, longest, kind or self._device).total

    def measure(self, work: Workload, steps: int = 3) -> Usage:
        """Measures loading and steps by the device's allocator: the first step may capture a graph, the next have all state.

        On CUDA what stays is what tensors asked for, without the allocator's rounding.
        """
        before = _requested(self._device)
        with allocated(self._device) as taken:
            trainer = self._trainer(work)
            _accumulate(trainer, _padded(work, self._device), work.accumulation, steps)  # the batch goes with it
            gc.collect()
            stays = _requested(self._device) - before
        return Usage(taken["peak"], stays if self._device.type == "cuda" else taken["kept"], _thawed(trainer.classifier))

    def saved(self, work: Workload) -> int:
        """Counts the bytes that automatic differentiation saves in a forward pass, each storage once, without the model's own."""
        model, batch = self._trainer(work).classifier, _padded(work, self._device)
        own = {value.untyped_storage()._cdata for value in (*model.parameters(), *model.buffers())}
        alive: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in own:
                alive[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.loss(model(batch.input_ids, batch.mask), batch.labels)
        return sum(tensor.untyped_storage().nbytes() for tensor in alive.values())

    @property
    def backends(self) -> tuple[str, ...]:
        """All that steps can be computed by here. Triton's interpreter, which runs kernels on a CPU, would take minutes for so many."""
        able = kernels.why_not() is None and self._device.type == "cuda"
        return ("torch", "triton", "fused") if able else ("torch",)

    def grown(self, work: Workload, lengths: Sequence[int], warm_up: int, steps: int) -> Growth:
        """Measures by the allocator how much steps leave behind, after others that warm up, on batches of those lengths in turn."""
        with nullcontext() if work.backend == "fused" else dispatch.backend(work.backend):
            return self._grown(work, lengths, warm_up, steps)

    def kept_by_lengths(self, work: Workload, lengths: Sequence[int]) -> int:
        """How many tensors more live after a step on a batch of each of the second half of the lengths, by torch's operations, than after
        those of the first half."""
        counts = list[int]()
        with dispatch.backend("torch"):
            trainer = self._trainer(work)
            for half in (lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :]):
                for length in half:
                    trainer.train_batch(batch_of(replace(work, seq=length), self._device))
                counts.append(_tensors())
        return counts[1] - counts[0]

    def _grown(self, work: Workload, lengths: Sequence[int], warm_up: int, steps: int) -> Growth:
        if self._device.type == "cuda":
            trainer, batches = self._trainer(work), self._batches(work, lengths)
            _train(trainer, batches, warm_up)
            before = _held(self._device)
            _train(trainer, batches, steps)
            return Growth(trainer.optimiser.steps, _beyond(before, _held(self._device)))
        # That a tensor goes which was there before is not counted: so runs with and without the steps, each from its beginning, after one
        # that makes what a process keeps.
        runs = [self._kept(work, lengths, count) for count in (len(lengths), warm_up, warm_up + steps)]
        return Growth(runs[-1][0], _beyond(runs[-2][1], runs[-1][1]))

    def _kept(self, work: Workload, lengths: Sequence[int], steps: int) -> tuple[int, dict[str, int]]:
        with allocated(self._device) as taken:
            trainer = self._trainer(work)
            _train(trainer, self._batches(work, lengths), steps)
            tensors = _tensors()
        return trainer.optimiser.steps, {"bytes": taken["kept"], "tensors": tensors, "peak": taken["peak"]}

    def load_nf4(self, folder: Path) -> Quantised:
        """A checkpoint loaded into a classifier with NF4."""
        with allocated(torch.device("cpu"), _sizes(folder)) as taken:
            stored = checkpoint.load_checkpoint(folder)
            adaptation = classifier.Adaptation(2, 1, 2.0, nf4=True)
            trainable = classifier.initial_trainable(stored.config, adaptation, 0)
            made = classifier.Classifier(stored.config, adaptation, stored.tensors, trainable, dtype=torch.float32, device=self._device)
            del stored, trainable
        tensors = dict([*made.named_parameters(), *made.named_buffers()])
        absmax = {name: value.cpu().numpy() for name, value in tensors.items() if name.endswith(".quantized.absmax")}
        resident = sum(value.nbytes for value in tensors.values() if value.device.type == "cpu")
        return Quantised(taken["peak"], resident, {name.removesuffix(".quantized.absmax"): value for name, value in absmax.items()})

    def read(self, folder: Path) -> tuple[int, int]:
        """The most bytes that the host's allocator and Python hold while the largest tensor of a checkpoint is read, and the tensor's."""
        stored = checkpoint.load_checkpoint(folder).tensors
        shapes = shapes_of(stored)
        name = max(shapes, key=lambda name: math.prod(shapes[name]))
        tracemalloc.start()
        try:
            with allocated(torch.device("cpu"), _sizes(folder)) as taken:
                size = stored[name].nbytes
            return taken["peak"] + tracemalloc.get_traced_memory()[1], size
        finally:
            tracemalloc.stop()

    def written(self, folder: Path) -> dict[str, int]:
        """The host's allocator at the peak where a checkpoint is written as an .apr file, as another folder, and merged with an update.

        The disk is slow. Where other threads allocate, which the allocator's record does not see, it is what is held at a write.
        """
        peaks, sizes = dict[str, int](), _sizes(folder)
        for name in ("exported", "saved", "merged"):
            held = list[int]()
            with allocated(torch.device("cpu"), sizes) as taken, slow(held_by_then(sizes, held)):
                stored, output = checkpoint.load_checkpoint(folder), folder / f"{name}.apr"
                if name == "exported":
                    apr_write.export_apr(stored, folder, output, "float16")
                elif name == "saved":
                    checkpoint.save_checkpoint(output, stored.config, stored.tensors)
                else:
                    adaptation = classifier.Adaptation(2, 1, 2.0, "all")
                    update = adapter.Adapter(adaptation, classifier.initial_trainable(stored.config, adaptation, 0))
                    merge.save_merged(output, stored, update, source=folder)
            peaks[name] = max(taken["peak"], *held)
        return peaks

    def opened(self, folder: Path) -> dict[str, int]:
        """The host's allocator at the peak beyond what stays there, where a pipeline in NF4 is opened on a checkpoint with its tokenizer,
        and where its adapter, which it saves in that folder, is opened."""
        adapters, beyond = folder / "adapter", dict[str, int]()
        config = ClassifyConfig(num_classes=2, lora_rank=1, lora_alpha=2.0, max_seq_len=8, quantize_nf4=True)
        opens: dict[str, Callable[[], ClassifyPipeline]] = {
            "fresh": lambda: ClassifyPipeline.from_pretrained(folder, config, device=self._device),
            "saved": lambda: ClassifyPipeline.from_saved(adapters, device=self._device),
        }
        for name, open_it in opens.items():
            with allocated(torch.device("cpu"), _sizes(folder)) as taken:
                made = open_it()
            held = (*made.classifier.parameters(), *made.classifier.buffers())
            beyond[name] = taken["peak"] - sum(value.nbytes for value in held if value.device.type == "cpu")
            made.save(adapters)
        return beyond

    def looked_at(self, count: int) -> dict[str, tuple[int, int]]:
        """The allocator's peak while a base's weight of so many numbers is looked at, for a run's digest and for one that is not finite,
        and what is held when that is over."""
        base, taken_by = torch.nn.Module(), dict[str, tuple[int, int]]()
        base.register_buffer("weight", torch.ones(count, dtype=torch.bfloat16, device=self._device))
        looks: dict[str, Callable[[torch.nn.Module], str | None]]
        looks = {"digest": whole_runs._weights_digest, "what is not finite": nonfinite.spoiled_parameter}
        for name, look in looks.items():
            with allocated(self._device) as taken:
                look(base)
            taken_by[name] = taken["peak"], taken["kept"]
        return taken_by

    def taken_by_a_sum(self, workers: int, count: int) -> float:
        """What is allocated at the peak while so many workers sum a vector of so many numbers, in vectors; nothing is exchanged."""
        place, feigned = torch.device("meta"), dict[str, Any]({"get_rank": lambda: 0, "get_world_size": lambda: workers})
        feigned |= dict.fromkeys(("all_gather", "all_gather_into_tensor"), lambda *_, **__: None)
        with mock.patch.multiple(distributed, **feigned):
            vector, summing = torch.empty(count, device=place), group.DistributedGroup(place)
            with allocations.Allocations(place.type) as taken:
                summing.sum(vector)
        return float(taken.peak / vector.nbytes)

    def held(self, work: Workload) -> int:
        """Bytes of the allocator that a classifier keeps after a forward pass over one token, whatever holds them."""
        config, adaptation = config_of(work.scalars), adaptation_of(work.scalars)
        trainable, dtype = classifier.initial_trainable(config, adaptation, work.seed), getattr(torch, work.dtype)
        token = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
        _requested(self._device)  # without cuBLAS's workspace, which the first product of a process makes
        with allocated(self._device) as taken, torch.no_grad():
            base = RandomTensors(classifier.base_shapes(config), dtype, self._device)
            made = classifier.Classifier(config, adaptation, base, trainable, dtype=dtype, device=self._device)
            made(token, torch.ones_like(token, dtype=torch.bool))
            gc.collect()
            _requested(self._device)
        return taken["kept"]

    def _trainer(self, work: Workload) -> Trainer:
        """A trainer whose base weights are drawn on the device."""
        config, dtype = config_of(work.scalars), getattr(torch, work.dtype)
        base = RandomTensors(classifier.base_shapes(config), dtype, self._device)
        return trainer_of(work, base, classifier.initial_trainable(config, adaptation_of(work.scalars), work.seed), self._device)

    def _batches(self, work: Workload, lengths: Sequence[int]) -> list[Batch]:
        return [batch_of(work, self._device, length) for length in lengths]


class RandomTensors(LazyTensors):
    """A model's tensors drawn on the device, one at a time."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = shapes, dtype, device

    @property
    def shapes(self) -> Shapes:
        """Name and shape of every tensor."""
        return self._shapes

    def __getitem__(self, name: str) -> Tensor:
        """Norms and biases one, all else N(0, 0.02²)."""
        tensor = torch.ones(self._shapes[name], dtype=self._dtype, device=self._device)
        return tensor if tensor.ndim == 1 else tensor.normal_(std=0.02)


def _sizes(folder: Path) -> list[int]:
    """Those of the files that are mapped, which takes none of the allocator's memory."""
    return [path.stat().st_size for path in folder.glob("*.safetensors")]


@contextmanager
def _cards_of(capabilities: Sequence[int]) -> Iterator[None]:
    """Inside the block the host has cards of those major compute capabilities, of which the first is the current one."""

    def of_card(asked: torch.device | str | int | None = None) -> tuple[int, int]:
        index = torch.device(asked).index if isinstance(asked, torch.device | str) else asked
        return capabilities[index or 0], 0

    count = len(capabilities)
    with mock.patch.multiple("torch.cuda", is_available=lambda: True, device_count=lambda: count, get_device_capability=of_card):
        yield


def _train(trainer: Trainer, batches: Sequence[Batch], steps: int) -> None:
    for step in range(steps):
        trainer.train_batch(batches[step % len(batches)])


def _accumulate(trainer: Trainer, batch: Batch, accumulation: int, steps: int) -> None:
    for _ in range(steps):
        if accumulation == 1:
            trainer.train_batch(batch)
            continue
        for _ in range(accumulation):
            trainer.accumulate(batch)
        trainer.apply()


def _held(place: torch.device) -> dict[str, int]:
    """Bytes live and tensors, bytes and segments that CUDA's allocator holds, and how often it has asked the driver for memory."""
    tensors = _tensors()
    torch.cuda.synchronize(place)
    counted = torch.cuda.memory_stats(place)
    held = {
        "reserved": torch.cuda.memory_reserved(place),
        "segments": counted["segment.all.current"],
        "driver": counted["num_device_alloc"],
    }
    return {"bytes": torch.cuda.memory_allocated(place), "tensors": tensors, **held}


def _tensors() -> int:
    """How many of them live, of whatever device, also those that only look at others' bytes."""
    gc.collect()
    return sum(count for kind, count in Counter(map(type, gc.get_objects())).items() if issubclass(kind, Tensor))


def _beyond(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in after.items()}


def _requested(place: torch.device) -> int:
    """Bytes of what is live on a GPU, without what the allocator rounds up and without cuBLAS's workspaces; 0 elsewhere.

    The workspaces go: a captured graph must not run after this.
    """
    if place.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(place)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_stats(place)["requested_bytes.all.current"])


def _thawed(model: classifier.Classifier) -> int:
    trained = model.trainable_parameters()
    tensors: Mapping[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return sum(value.requires_grad or value.grad is not None for name, value in tensors.items() if name not in trained)


def _padded(work: Workload, device: torch.device) -> Batch:
    """A batch of the workload with a token of padding, as most have some, for which more is kept than for one without; without, where the
    hand-written layers leave padding out or a sample has one token."""
    batch = batch_of(work, device)
    if work.backend != "fused" and work.seq > 1:
        batch.mask[0, -1] = False
    return batch
