"""The subject `impl`: NumPy arrays in, the real PyTorch operations, models and trainer, NumPy arrays out."""

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from blackswan import contracts
from blackswan.contracts.model import Signature
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.precision import CUDA_ONLY, signatures
from blackswan.falsifiers.subjects.conversion import adaptation_of, config_of
from blackswan.falsifiers.subjects.conversion import to_numpy as to_numpy
from blackswan.falsifiers.subjects.impl import open_door
from blackswan.falsifiers.subjects.protocol import COTANGENT, Interrupted, Subject, TracedCall
from blackswan.falsifiers.subjects.repeated import Repeated
from blackswan.impl import dispatch, kernels
from blackswan.impl.classifier import Classifier, trainable_shapes
from blackswan.impl.config import ClassifyConfig
from blackswan.impl.decoder import Decoder
from blackswan.impl.device import resolve_device, set_tf32
from blackswan.impl.fused.step import FusedTrainer, why_not
from blackswan.impl.group import ALONE, Group
from blackswan.impl.operations import OPERATIONS
from blackswan.impl.pretrain import StepFn, ValFn
from blackswan.impl.token_shards import TokenBatch
from blackswan.impl.trainer import Batch, BatchResult, Trainer
from blackswan.reference.table import Array

Arrays = Mapping[str, Array]
Tensors = dict[str, torch.Tensor]
Scalars = Mapping[str, Any]

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype.storage) for name, dtype in contracts.DTYPES.items() if name != "float16"}
PARAMETERS = "parameters/"
TRAINING = ("train_steps", "multi_label_steps", "pretrain_steps")
FUSED = ("train_steps", "multi_label_steps")
FUSED_PARTS = ("attention", "linear", "pool")

_CONFIGURED = (
    "num_classes",
    "lora_rank",
    "lora_alpha",
    "learning_rate",
    "epochs",
    "batch_size",
    "accumulation_steps",
    "gradient_clip_norm",
    "quantize_nf4",
    "double_quantize",
    "warmup_fraction",
    "weight_decay",
    "pooling",
)
"""The settings that hyperparameter rules speak of."""


class Implementation(Subject):
    """Runs `impl` on a device. Raises DeviceUnavailable or a ValueError for a device that is not there or not in the grammar.

    `backend`: what computes the operations that have kernels, as `impl.dispatch.backend` names it; None leaves that as it is.
    """

    name = "impl"
    names_errors = True

    def __init__(self, device: str = "cpu", backend: str | None = None) -> None:
        self._device, self.backend = resolve_device(device), backend
        self.device = str(self._device)
        if self._device.type == "cuda":
            set_tf32(False)

    def __reduce__(self) -> tuple[type["Implementation"], tuple[str, str | None]]:
        """Made anew in another process, settings of the device included."""
        return Implementation, (self.device, self.backend)

    def using(self, backend: str) -> "Implementation":
        """This subject with its operations computed by that backend."""
        other = copy.copy(self)
        other.backend = backend
        if backend in ("triton", "fused") and self._device.type == "cpu" and kernels.interpreted():
            other.emulator = "Triton's interpreter"
        return other

    def unsupported(self, operation: str, dtype: str) -> str | None:
        """Why the operation cannot run in that dtype here; None when it can."""
        if dtype not in DTYPES:
            return f"impl has no {dtype}; it has {', '.join(DTYPES)}"
        if dtype in CUDA_ONLY and self._device.type != "cuda":
            return CUDA_ONLY[dtype]
        if operation not in OPERATIONS and operation not in _COMPOSITIONS:
            return f"impl has no operation {operation}"
        return None if self.backend in (None, "torch") else self._without_kernels(operation, dtype)

    def _without_kernels(self, operation: str, dtype: str) -> str | None:
        if self.backend == "fused" and operation in FUSED:
            return why_not(DTYPES[dtype], self._device)
        names = FUSED_PARTS if self.backend == "fused" else (*kernels.NAMES, *_COMPOSITIONS)
        if dtype == "float64" or operation not in names:
            return f"impl has no {self.backend} {operation} in {dtype}"
        if dtype == "bfloat16" and self.emulator and operation != "pool":  # which needs no kernel
            return f"{self.emulator} cuts float32 off to bfloat16, where a GPU rounds to nearest"
        return kernels.why_not()

    def run(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> dict[str, Array]:
        """The operation's outputs."""
        with self._products(dtype), torch.set_grad_enabled(operation in TRAINING), self._given(operation, inputs, scalars, dtype) as given:
            outputs, _ = self._forward(operation, given, scalars, dtype, ())
        return {name: to_numpy(value) for name, value in outputs.items()}

    def differentiate(
        self, operation: str, inputs: Arrays, scalars: Scalars, cotangents: Arrays, wrt: Sequence[str], dtype: str
    ) -> dict[str, Array]:
        """The vector-Jacobian products with respect to the inputs in `wrt`; zero for an input that the graph does not reach."""
        with self._products(dtype), self._given(operation, inputs, scalars, dtype) as given:
            outputs, leaves = self._forward(operation, given, scalars, dtype, wrt)
            roots, upstream = self._roots(outputs, cotangents)
            wanted = [leaves[name] for name in wrt]
            found = torch.autograd.grad(roots, wanted, upstream, allow_unused=True) if roots else [None] * len(wanted)
        gradients = (torch.zeros_like(leaf) if value is None else value for leaf, value in zip(wanted, found, strict=True))
        return {name: to_numpy(value) for name, value in zip(wrt, gradients, strict=True)}

    def at_rows(
        self,
        operation: str,
        inputs: Arrays,
        scalars: Scalars,
        dtype: str,
        count: int,
        rows: Sequence[int],
        cotangents: Arrays | None = None,
    ) -> dict[str, Array]:
        """These rows of its outputs, or gradients, for repeated rows. Lacks where the device has too little memory for that."""
        signature = signatures()[operation]
        whole = Repeated(signature, count, rows, "outputs" if cotangents is None else "gradients")
        wrt = [] if cotangents is None else whole.wrt(inputs)

        def compute(given: Tensors) -> Tensors:
            upstream = {name: given.pop(f"{COTANGENT}{name}") for name in cotangents or ()}
            outputs, leaves = self._results(operation, signature, given, scalars, dtype, wrt)
            if cotangents is None:
                return outputs
            wanted = [leaves[name] for name in wrt]
            found = torch.autograd.grad([outputs[name] for name in upstream], wanted, list(upstream.values()))
            return dict(zip(wrt, found, strict=True))

        with self._products(dtype), self._backend(operation, dtype), torch.set_grad_enabled(cotangents is not None):
            tensors = self._tensors(signature, inputs, scalars, dtype)
            for name, value in (cotangents or {}).items():
                tensors[f"{COTANGENT}{name}"] = self._tensor(value, whole.cotangent_dtype(name, DTYPES[dtype]))
            answer = whole.around(compute)(tensors)
        return {name: to_numpy(value) for name, value in answer.items()}

    def record(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str, cotangents: Arrays | None = None) -> list[TracedCall]:
        """The calls that the operation makes, in order, with local gradients when cotangents are given. Interrupted where it raises."""
        wrt = [] if cotangents is None else self._differentiable(operation, inputs, scalars)
        given = self._tensors(signatures()[operation], inputs, scalars, dtype)
        with self._products(dtype), dispatch.recording() as calls:
            try:
                outputs, _ = self._forward(operation, given, scalars, dtype, wrt)
                roots, upstream = self._roots(outputs, cotangents or {})
                if roots:
                    torch.autograd.backward(roots, upstream)
            except Exception as error:  # whatever it raises, what was recorded before says why
                raise Interrupted([traced(call) for call in calls]) from error
        return [traced(call) for call in calls]

    def door(self, name: str) -> object:
        """Opens the door of that name, see `subjects.doors`. Raises Lacks where there is none."""
        return open_door(name, self._device, self.backend)

    def default_configurations(self, model_params: float) -> list[dict[str, Any]]:
        """The settings that `impl` gives a user who asked for none."""
        defaults = (ClassifyConfig(), ClassifyConfig.qlora_default(model_params))
        return [{name: getattr(config, name) for name in _CONFIGURED} for config in defaults]

    def prepare(self, inputs: Arrays, scalars: Scalars, dtype: str, group: Group) -> tuple[Trainer, list[Batch]]:
        """The trainer of `train_steps` as a member of a group, and the whole batch of each step."""
        model = _Model(
            self._tensors(signatures()["train_steps"], inputs, scalars, dtype), scalars, DTYPES[dtype], self._device, self.backend
        )
        return _trainer(model, group), [model.batch(samples) for samples in _slices(scalars)]

    @contextmanager
    def _products(self, dtype: str) -> Iterator[None]:
        """Inside the block float32 products on CUDA round their operands to TF32 where `dtype` says so; after it they do not."""
        if self._device.type == "cuda":
            set_tf32(dtype == "tf32")
        try:
            yield
        finally:
            if self._device.type == "cuda":
                set_tf32(False)

    @contextmanager
    def _given(self, operation: str, inputs: Arrays, scalars: Scalars, dtype: str) -> Iterator[Tensors]:
        """The inputs as tensors. SubjectError where one is changed at the end of the block, but for parameters that are trained."""
        given = self._tensors(signatures()[operation], inputs, scalars, dtype)
        trains = operation in TRAINING
        before = {name: value.clone() for name, value in given.items() if not (trains and name.startswith(PARAMETERS))}
        yield given
        for name, value in before.items():
            if not torch.equal(_bytes(value), _bytes(given[name])):
                raise SubjectError(f"changed its input {name} in place")

    def _forward(
        self, operation: str, given: Tensors, scalars: Scalars, dtype: str, wrt: Sequence[str]
    ) -> tuple[Tensors, Mapping[str, torch.Tensor]]:
        """The outputs, and the leaf of each input in `wrt`."""
        with self._backend(operation, dtype):
            return self._results(operation, signatures()[operation], given, scalars, dtype, wrt)

    def _backend(self, operation: str, dtype: str) -> AbstractContextManager[None]:
        """The context in which the subject's backend computes. ValueError where it does not compute the operation in that dtype."""
        reason = self.unsupported(operation, dtype)
        if reason:
            raise ValueError(reason)
        return nullcontext() if self.backend in (None, "fused") else dispatch.backend(self.backend)

    def _results(
        self, operation: str, signature: Signature, tensors: Tensors, scalars: Scalars, dtype: str, wrt: Sequence[str]
    ) -> tuple[Tensors, Mapping[str, torch.Tensor]]:
        if operation in _COMPOSITIONS:
            return _COMPOSITIONS[operation](_Model(tensors, scalars, DTYPES[dtype], self._device, self.backend), wrt)
        leaves = {name: tensors[name].requires_grad_() for name in wrt}
        extra = {"dtype": DTYPES[dtype]} if operation == "nf4_dequantize" else {}
        with dispatch.replaced(_fused_parts() if self.backend == "fused" else {}):
            result = dispatch.call(operation, operation, **tensors, **scalars, **extra)
        results = result if isinstance(result, tuple) else (result,)
        return dict(zip(signature.outputs, results, strict=True)), leaves

    def _tensors(self, signature: Signature, inputs: Arrays, scalars: Scalars, dtype: str) -> Tensors:
        wide = torch.float64 if dtype == "float64" else torch.float32
        held = DTYPES[dtype] if signature.precision == "storage" else wide
        special = {name: torch.float32 for name, spec in signature.inputs.items() if spec.dtype == "float32"}
        if signature.composition and "classes" in scalars:
            special = {f"{PARAMETERS}{name}": wide for name in trainable_shapes(config_of(scalars), adaptation_of(scalars))}
        found = {name: self._tensor(value, special.get(name, held)) for name, value in inputs.items() if value is not None}
        if signature.composition:
            return found
        # A bias with strides torch adds on CUDA by another product, which rounds twice; parameters have none.
        return {name: value if name == "bias" else _laid_out(value) for name, value in found.items()}

    def _tensor(self, value: Array, real: torch.dtype) -> torch.Tensor:
        array = np.asarray(value, order="C")
        return torch.tensor(array, dtype=real if array.dtype.kind == "f" else None, device=self._device)

    def _roots(self, outputs: Tensors, cotangents: Arrays) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs that have a cotangent and a graph, and their cotangents."""
        names = [name for name in cotangents if outputs[name].requires_grad]
        return [outputs[name] for name in names], [_laid_out(self._tensor(cotangents[name], outputs[name].dtype)) for name in names]

    def _differentiable(self, operation: str, inputs: Arrays, scalars: Scalars) -> list[str]:
        names = []
        for name in signatures()[operation].gradients:
            if name == "parameters":
                names += [key for key in inputs if key.startswith(PARAMETERS)]
            elif name == "trainable":
                names += [f"{PARAMETERS}{key}" for key in trainable_shapes(config_of(scalars), adaptation_of(scalars))]
            elif inputs.get(name) is not None:
                names.append(name)
        return names


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, in every other case with strides: its numbers alternate in memory with those of the tensor read backwards."""
    if tensor.numel() < 2 or zlib.crc32(_bytes(tensor).cpu().numpy().data) % 2:
        return tensor
    return torch.stack((tensor, tensor.flip(list(range(tensor.dim())))), dim=-1)[..., 0]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _fused_parts() -> Mapping[str, Callable[..., torch.Tensor]]:
    from blackswan.falsifiers.subjects.impl.fused_parts import OPERATIONS  # imports Triton

    return OPERATIONS


def traced(call: dispatch.Call) -> TracedCall:
    """A recorded call with its tensors on the host."""
    return TracedCall(
        path=call.path,
        operation=call.operation,
        inputs={name: to_numpy(value) for name, value in call.inputs.items() if value is not None},
        scalars=call.scalars,
        outputs={name: to_numpy(value) for name, value in call.outputs.items()},
        gradients={name: to_numpy(value) for name, value in call.input_gradients().items()},
        cotangents={name: to_numpy(value) for name, value in call.output_gradients().items()},
    )


class _Model:
    """The inputs of a composition, and the real modules that are built from its parameters."""

    def __init__(self, tensors: Tensors, scalars: Scalars, dtype: torch.dtype, device: torch.device, backend: str | None = None) -> None:
        self.tensors, self.scalars, self.dtype, self.device, self.backend = tensors, scalars, dtype, device, backend
        self.config = config_of(scalars)
        self.parameters = {name.removeprefix(PARAMETERS): value for name, value in tensors.items() if name.startswith(PARAMETERS)}

    def decoder(self) -> Decoder:
        return Decoder(self.config, self.parameters, dtype=self.dtype, device=self.device)

    def classifier(self) -> Classifier:
        adaptation = adaptation_of(self.scalars)
        names = trainable_shapes(self.config, adaptation)
        trainable = {name: value for name, value in self.parameters.items() if name in names}
        base = {name: value for name, value in self.parameters.items() if name not in names}
        return Classifier(self.config, adaptation, base, trainable, dtype=self.dtype, device=self.device)

    def batch(self, samples: slice = slice(None)) -> Batch:
        return Batch(self.tensors["input_ids"][samples], self.tensors["mask"][samples], self.tensors["labels"][samples])

    def rows(self, samples: slice = slice(None)) -> TokenBatch:
        return TokenBatch(self.tensors["input_ids"][samples], self.tensors["mask"][samples])


def _leaves(module: torch.nn.Module, wrt: Sequence[str]) -> dict[str, torch.Tensor]:
    """The module's own parameters of those names. Nothing is made differentiable here that the module has frozen."""
    return {name: module.get_parameter(name.removeprefix(PARAMETERS)) for name in wrt}


def _decoder_forward(model: _Model, wrt: Sequence[str]) -> tuple[Tensors, dict[str, torch.Tensor]]:
    decoder = model.decoder()
    hidden = decoder(model.tensors["input_ids"], model.tensors["mask"])
    return {"hidden": hidden, "logits": decoder.logits(hidden)}, _leaves(decoder, wrt)


def _language_model_loss(model: _Model, wrt: Sequence[str]) -> tuple[Tensors, dict[str, torch.Tensor]]:
    decoder = model.decoder()
    decoder.requires_grad_(bool(wrt))
    return {"loss": decoder.loss(model.tensors["input_ids"], model.tensors["mask"])}, _leaves(decoder, wrt)


def _classifier_forward(model: _Model, wrt: Sequence[str]) -> tuple[Tensors, dict[str, torch.Tensor]]:
    classifier = model.classifier()
    return {"logits": classifier(model.tensors["input_ids"], model.tensors["mask"])}, _leaves(classifier, wrt)


def _classifier_loss(model: _Model, wrt: Sequence[str]) -> tuple[Tensors, dict[str, torch.Tensor]]:
    classifier, batch = model.classifier(), model.batch()
    logits = classifier(batch.input_ids, batch.mask)
    loss = classifier.loss(logits, batch.labels, model.tensors.get("class_weights"))
    return {"loss": loss, "logits": logits}, _leaves(classifier, wrt)


def _train_steps(model: _Model, wrt: Sequence[str]) -> tuple[Tensors, dict[str, torch.Tensor]]:
    del wrt
    trainer = _trainer(model, ALONE)
    return trained(trainer, [trainer.train_batch(model.batch(samples)) for samples in _slices(model.scalars)]), {}


def trained(trainer: Trainer, results: Sequence[BatchResult]) -> Tensors:
    """The outputs of `train_steps`: what the trainer holds after its steps, and the loss and the norm of each."""
    optimiser = trainer.optimiser
    wide = optimiser.exp_avg.dtype
    groups: dict[str, Mapping[str, torch.Tensor]] = {
        "trainable": trainer.classifier.trainable_parameters(),
        "exp_avg": optimiser.split(optimiser.exp_avg),
        "exp_avg_sq": optimiser.split(optimiser.exp_avg_sq),
        "frozen": {name: value for name, value in trainer.classifier.named_parameters() if name not in optimiser.parameters},
    }
    return _curves(results, wide) | {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}


def _step_settings(scalars: Scalars, weight_decay: float) -> dict[str, Any]:
    """The settings of every training step, with the defaults of the operations' signatures."""
    given = {"total_steps": scalars["steps"], "micro_batch": scalars["micro"], "learning_rate": scalars["learning_rate"]}
    defaults = {"warmup_fraction": 0.0, "schedule": "constant", "weight_decay": weight_decay, "max_norm": 1.0}
    return given | {name: scalars.get(name, value) for name, value in defaults.items()}


def _trainer(model: _Model, group: Group) -> Trainer:
    scalars = model.scalars
    make = partial(FusedTrainer, longest=model.tensors["input_ids"].shape[1]) if model.backend == "fused" else Trainer
    return make(
        model.classifier(),
        **_step_settings(scalars, weight_decay=0.01),
        class_weights=model.tensors.get("class_weights"),
        multi_label=model.tensors["labels"].is_floating_point(),
        group=group,
    )


def _pretrain_steps(model: _Model, wrt: Sequence[str]) -> tuple[Tensors, dict[str, torch.Tensor]]:
    del wrt
    scalars, decoder = model.scalars, model.decoder()
    step = StepFn(decoder, **_step_settings(scalars, weight_decay=0.1))
    results = [step.train(model.rows(samples)) for samples in _slices(scalars)]
    validation = torch.tensor(ValFn(decoder, scalars["micro"])([model.rows()]), dtype=model.dtype)
    return _curves(results, model.dtype) | {"validation": validation} | step.optimiser.state(), {}


def _curves(results: Sequence[Any], dtype: torch.dtype) -> Tensors:
    values = {"losses": [result.loss for result in results], "norms": [result.gradient_norm for result in results]}
    return {name: torch.tensor(value, dtype=dtype) for name, value in values.items()}


def _slices(scalars: Scalars) -> Iterator[slice]:
    batch = scalars["batch"]
    return (slice(step * batch, (step + 1) * batch) for step in range(scalars["steps"]))


_COMPOSITIONS: dict[str, Callable[[_Model, Sequence[str]], tuple[Tensors, dict[str, torch.Tensor]]]] = {
    "decoder_forward": _decoder_forward,
    "language_model_loss": _language_model_loss,
    "classifier_forward": _classifier_forward,
    "classifier_loss": _classifier_loss,
    "train_steps": _train_steps,
    "multi_label_steps": _train_steps,
    "pretrain_steps": _pretrain_steps,
}
