"""Steps of a trainer by either backend.

On a CPU the hand-written layers compute by plain formulas in the places of Triton's kernels, which have claims of their own and take a
thousand times as long in its interpreter; and computations behave as captured ones do.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from blackswan.falsifiers.subjects.conversion import adaptation_of, config_of, to_numpy
from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.falsifiers.subjects.impl.feigned import Alike
from blackswan.falsifiers.subjects.impl.late import few_tokens
from blackswan.falsifiers.subjects.protocol import Lacks, Session
from blackswan.falsifiers.subjects.shared import default_dtype
from blackswan.impl import kernels, pipeline
from blackswan.impl.classifier import Classifier, trainable_shapes
from blackswan.impl.fused import step
from blackswan.impl.fused.packing import Packed
from blackswan.impl.fused.step import FusedTrainer
from blackswan.impl.group import ALONE
from blackswan.impl.nf4 import Nf4Weight
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.operations.attention import frequencies
from blackswan.impl.optimiser import AdamW
from blackswan.impl.pipeline import ClassifyPipeline
from blackswan.impl.trainer import Batch, Trainer
from blackswan.reference.table import Array


def _in_one_buffer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as parts of one vector, in the reverse order of their names, as a program may hold a whole model.

    Each number of a vector, and each row of a matrix, alternates with others.
    """
    names = sorted(tensors, reverse=True)
    doubled = {name: torch.stack([tensors[name]] * 2, dim=1) for name in names}
    parts = torch.split(torch.cat([doubled[name].reshape(-1) for name in names]), [doubled[name].numel() for name in names])
    return {name: part.view(doubled[name].shape)[:, 0] for name, part in zip(names, parts, strict=True)}


def _among_others(value: Tensor) -> Tensor:
    return torch.stack([value, value], dim=1)[:, 0]


@contextmanager
def other_defaults() -> Iterator[None]:
    """Inside the block torch makes tensors in bfloat16, and without content, where it is not told a dtype and a device, and those that are
    empty hold no number."""
    before, only_warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with default_dtype("bfloat16"), torch.device("meta"):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)


class Steps(Session):
    """A trainer of a classifier with those float32 weights, alone or one of two `workers`, of which the other does the same.

    Lacks where Triton, which the hand-written layers import, is not there.
    """

    def __init__(self, work: Workload, weights: Mapping[str, Array], settings: Mapping[str, Any], place: torch.device, plain: bool) -> None:
        plain = plain and place.type == "cpu"
        if work.backend == "fused" and (missing := kernels.missing() if plain else kernels.why_not()):
            raise Lacks(missing)
        self._place, self._plain = place, plain and work.backend == "fused"
        scalars, tensors = work.scalars | dict(settings.get("scaling", {})), {name: torch.tensor(value) for name, value in weights.items()}
        config, adaptation = config_of(scalars), adaptation_of(scalars)
        trained = {name: tensors.pop(name) for name in trainable_shapes(config, adaptation)}
        made = Classifier(config, adaptation, _in_one_buffer(tensors), trained, dtype=getattr(torch, work.dtype), device=place)
        given = {name: value for name, value in settings.items() if name not in ("scaling", "workers")} | {"micro_batch": work.micro}
        given["group"] = Alike() if settings.get("workers", 1) > 1 else ALONE
        if given.get("class_weights") is not None:
            given["class_weights"] = torch.tensor(given["class_weights"], device=place)
        fused = _Captured if place.type == "cpu" else FusedTrainer
        self._trainer = fused(made, longest=work.seq, **given) if work.backend == "fused" else Trainer(made, **given)

    def call(
        self, name: str, ids: Array, mask: Array, labels: Array, inside: AbstractContextManager[Any] | None = None
    ) -> dict[str, float]:
        """A call of the trainer with a batch, whose samples alternate in memory with others: what it says. `apply` takes what was
        accumulated. It is made inside that block; on a CPU torch's defaults are others than a program may count on."""
        batch = Batch(*(_among_others(torch.tensor(value, device=self._place)) for value in (ids, mask, labels)))
        on_cpu = self._place.type == "cpu"
        defaults = other_defaults() if on_cpu and isinstance(self._trainer, FusedTrainer) else nullcontext()
        few, plain = few_tokens() if on_cpu else nullcontext(), plain_kernels() if self._plain else nullcontext()
        with few, plain, defaults, inside or nullcontext():
            found = getattr(self._trainer, name)(*([] if name == "apply" else [batch]))
        return {name: float(getattr(found, name) or 0.0) for name in ("loss", "correct", "total", "gradient_norm")}

    def broken(self, function: str, name: str, ids: Array, mask: Array, labels: Array) -> str:
        """How a call ends that Ctrl-C breaks off in that formula, or in that function of the step."""
        from blackswan.impl.fused import layer  # imports Triton

        broken = mock.patch.object(layer if hasattr(layer, function) else step, function, side_effect=KeyboardInterrupt)
        try:
            self.call(name, ids, mask, labels, broken)
        except KeyboardInterrupt as error:
            return type(error).__name__
        return "nothing"

    def state(self) -> dict[str, Array]:
        """The trainer's state."""
        return {name: to_numpy(value) for name, value in self._trainer.state().items()}

    def frozen(self) -> dict[str, Array]:
        """The frozen tensors of the classifier, how many require a gradient, and the weights that its projections in NF4 compute with."""
        model = self._trainer.classifier
        held: dict[str, Tensor] = {name: value for name, value in model.named_parameters() if name not in model.trainable_parameters()}
        held["that require a gradient"] = torch.tensor(sum(value.requires_grad for value in held.values()))
        packed = {name: module for name, module in model.named_modules() if isinstance(module, Nf4Weight)}
        return {
            name: to_numpy(value) for name, value in (held | {name: q.dequantized(torch.float32) for name, q in packed.items()}).items()
        }

    def gradient(self) -> Array:
        """The mean gradient over the samples that wait."""
        return to_numpy(self._trainer.gradient_vector())

    def set_rate(self, rate: float) -> None:
        """The rate of the next step."""
        self._trainer.learning_rate = rate

    def set_norm(self, norm: float) -> None:
        """The largest norm of the gradients of the next steps."""
        self._trainer.max_norm = norm

    def set_class_weights(self, weights: Sequence[float] | None) -> None:
        """The weights of the classes in the next steps, or none; the caller keeps those before."""
        self._weights_before = self._trainer.class_weights
        self._trainer.class_weights = None if weights is None else torch.tensor(weights, device=self._place)

    def put_class_weights_back(self) -> None:
        """The weights of the classes in the next steps are the tensor that was there before others were set."""
        self._trainer.class_weights = self._weights_before

    def write_class_weights(self, factor: float) -> None:
        """Multiplies the weights of the classes, if there are any, where they are."""
        if self._trainer.class_weights is not None:
            self._trainer.class_weights *= factor

    def set_decay(self, decay: float) -> None:
        """The weight decay of the next steps."""
        self._trainer.optimiser.weight_decay = decay

    def move_elsewhere(self) -> None:
        """Gives each trained tensor but the first and the last memory of its own."""
        _, *others, _ = self._trainer.classifier.trainable_parameters().values()
        for parameter in others:
            parameter.data = parameter.data.clone()

    def load(self, state: Mapping[str, Array]) -> None:
        """Puts a state in place."""
        self._trainer.load_state({name: torch.tensor(value) for name, value in state.items()})


class _Captured(FusedTrainer):
    """Computes on a CPU as CUDA graphs do: what was computed first of that size, with the tensors and numbers that the trainer held then,
    and into the results of that one."""

    def _replayed(self, kind: str, packed: Packed, compute: Callable[[Packed], Any]) -> Any:
        graphs: dict[Any, Any] = self._graphs
        key = (kind, len(packed.input_ids))
        if key not in graphs:
            kept = (AdamW, list, type(self.model))  # the model is made once, before the copy
            seen = copy.copy(self)
            seen.__dict__.update({name: copy.copy(value) for name, value in vars(self).items() if isinstance(value, kept)})
            captured = MethodType(compute.__func__, seen)  # type: ignore[attr-defined]  # a method
            held = {name: value.clone() for name, value in vars(packed).items() if isinstance(value, Tensor)}
            graphs[key] = seen, replace(packed, **held), [], captured
        seen, fixed, result, captured = graphs[key]
        self._replay(step._Captured(mock.Mock(), fixed, None), packed)  # a graph that runs nothing: what it reads is filled
        found = super(_Captured, seen)._replayed(kind, fixed, captured)
        if not result:
            result.append(found)
        for into, value in zip(_tensors(result[0]), _tensors(found), strict=True):
            into.copy_(value)
        return result[0]


class _Plain(_Captured):
    """Computes by the formulas below, and fills up with few tokens, wherever it is called."""

    def _packed(self, part: Batch) -> Packed:
        with few_tokens():
            return super()._packed(part)

    def _replayed(self, kind: str, packed: Packed, compute: Callable[[Packed], Any]) -> Any:
        with few_tokens(), plain_kernels():
            return super()._replayed(kind, packed, compute)


class ByLayers(ClassifyPipeline):
    """A pipeline on a CPU whose steps go through the hand-written layers, by the formulas below."""

    def _backend(self) -> tuple[bool, str | None]:
        return not self.merged, None

    def _trainer(self, *given: Any) -> Trainer:
        with mock.patch.object(pipeline, "FusedTrainer", _Plain):
            return super()._trainer(*given)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else tuple(vars(result).values())


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Inside the block the hand-written layers compute by the formulas below; they import Triton."""
    from blackswan.impl.fused import layer, model, weights

    with ExitStack() as patched:
        for module in (layer, model, weights):
            for function in _FUNCTIONS:
                if hasattr(module, function.__name__):
                    patched.enter_context(mock.patch.object(module, function.__name__, function))
        yield


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y and 1 / rms of the rows."""
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return x * rstd[..., None] * weight, rstd


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The sum, and its norm."""
    return x + residual, *rms_norm(x + residual, weight, eps)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, add: Tensor | None = None) -> Tensor:
    """The gradient of x, and what is added to it."""
    normal, upstream = x * rstd[..., None], dy * weight
    dx = (upstream - normal * (upstream * normal).mean(-1, keepdim=True)) * rstd[..., None]
    return dx if add is None else dx + add


def rope_table(positions: Tensor, theta: float, head_dim: int, scaling: Any = None) -> Tensor:
    """Cosines and then sines."""
    angle = positions[:, None] * frequencies(head_dim // 2, theta, scaling, positions.device)
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def qk_norm_rope(
    x: Tensor, positions: Tensor, theta: float, weight: Tensor | None = None, eps: float = 0.0, *, table: Tensor
) -> tuple[Tensor, None]:
    """Normed where there is a weight, and turned."""
    del positions, theta
    return _turned(x if weight is None else rms_norm(x, weight, eps)[0], table), None


def qk_norm_rope_backward(
    dy: Tensor, x: Tensor, positions: Tensor, theta: float, weight: Tensor | None = None, eps: float = 0.0, *, table: Tensor, out: Tensor
) -> Tensor:
    """The gradient of x."""
    del positions, theta
    cos, sin = table.chunk(2, dim=1)
    dx = _turned(dy, torch.cat([cos, -sin], dim=1))
    return out.copy_(dx if weight is None else rms_norm_backward(dx, x, weight, rms_norm(x, weight, eps)[1]))


def _turned(x: Tensor, table: Tensor) -> Tensor:
    (first, second), (cos, sin) = x.chunk(2, dim=-1), table[:, None].chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def attention_forward(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Each sequence by itself; rows that no sequence of at most `longest` tokens has are NaN. Nothing stands for the logarithms."""
    y = torch.full_like(q, torch.nan)
    for first, after in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if 0 < after - first <= longest:
            real = torch.ones(1, after - first, dtype=torch.bool, device=q.device)
            y[first:after] = OPERATIONS["attention"](*(value[None, first:after] for value in (q, k, v)), real)[0]
    return y, y.new_empty(0)


def attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """By automatic differentiation."""
    del y, lse
    with torch.enable_grad():
        q, k, v = leaves = [value.detach().requires_grad_() for value in (q, k, v)]
        found = torch.autograd.grad(attention_forward(q, k, v, bounds, longest)[0], leaves, dy)
    for into, value in zip((dq, dk, dv), found, strict=True):
        into.copy_(value)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate · σ(gate) · up."""
    return gate * gate.sigmoid() * up


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor | None = None, dup: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradients, which may be written over what was read."""
    share = gate.sigmoid()
    found = dy * up * share * (1 + gate * (1 - share)), dy * gate * share
    return tuple(value if into is None else into.copy_(value) for into, value in zip((dgate, dup), found, strict=True))  # type: ignore[return-value]  # two


def nf4_dequantize(codes: Tensor, absmax: Tensor, rows: int, columns: int, block_size: int, dtype: torch.dtype, out: Tensor) -> Tensor:
    """The weight, into `out`."""
    weight: Tensor = OPERATIONS["nf4_dequantize"](codes, absmax, rows, columns, block_size, dtype=dtype)
    return out.copy_(weight)


_FUNCTIONS = (
    rms_norm,
    add_rms_norm,
    rms_norm_backward,
    rope_table,
    qk_norm_rope,
    qk_norm_rope_backward,
    attention_forward,
    attention_backward,
    swiglu,
    swiglu_backward,
    nf4_dequantize,
)
