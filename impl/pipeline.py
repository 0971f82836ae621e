"""A classifier with its tokens and settings: the entry points of training, evaluation and prediction."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blackswan.impl import dispatch
from blackswan.impl.adapter import Adapter, save_adapter
from blackswan.impl.apr import is_apr
from blackswan.impl.checkpoint import Checkpoint, load_checkpoint
from blackswan.impl.checksums import Checked, Checksums
from blackswan.impl.classifier import Adaptation, Classifier, base_shapes, initial_trainable, trainable_shapes
from blackswan.impl.config import ClassifyConfig, DecoderConfig, target_modules
from blackswan.impl.corpus import Sample
from blackswan.impl.decoder import random_tensors
from blackswan.impl.device import TESTED, resolve_device
from blackswan.impl.evaluation import Evaluation, evaluate
from blackswan.impl.fit import FitResult, OnEpoch, OnStep, fit
from blackswan.impl.fused.step import FusedTrainer, backend_of
from blackswan.impl.group import ALONE, Group
from blackswan.impl.merge import save_merged
from blackswan.impl.nonfinite import spoiled_parameter
from blackswan.impl.samples import Samples, tokenize, training_and_validation
from blackswan.impl.saved import RANDOM, Saved, is_merged, open_adapter, open_merged
from blackswan.impl.tensors import Tensors
from blackswan.impl.tokens import ByteTokens, Tokens, load_tokenizer, require_texts
from blackswan.impl.trainer import Batch, BatchResult, Trainer, class_probabilities, classes_of
from blackswan.impl.validation import require_finite
from blackswan.impl.warm_up import SHAPES, Constant, small, warmed

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Texts = Sequence[str]
Classes = list[int] | list[tuple[int, ...]]
Given = Samples | Sequence[Sample]


class ClassifyPipeline:
    """Architecture, base weights and trainable tensors on a device, with the tokens and settings of a run.

    Made by one of the class methods. `source` is the checkpoint's folder or .apr file, None for random weights; `merged` says that the
    updates are in the base weights, so that there is nothing to train. Steps outside `fit` are made by `trainer`, at the settings'
    learning rate until another is set.
    """

    def __init__(
        self,
        architecture: DecoderConfig,
        config: ClassifyConfig,
        base: Tensors,
        trainable: Tensors,
        tokens: Tokens,
        *,
        adaptation: Adaptation | None = None,
        device: torch.device | str = "cpu",
        source: Path | None = None,
        group: Group = ALONE,
    ) -> None:
        _require_fitting(architecture, config, tokens)
        self.architecture, self.config, self.tokens, self.group = architecture, config, tokens, group
        # Absolute, for a process may leave its folder; not resolved, for the target of a link, as in a cache, may have another name.
        self.source = None if source is None else source.absolute()
        self.device = resolve_device(device) if isinstance(device, str) else device
        self.adaptation, self._opened = adaptation or Adaptation.of(config), adaptation is not None
        self.merged = not self.adaptation.targets
        self.class_weights = None if isinstance(config.class_weights, str) else config.class_weights
        read = base if isinstance(base, Checked) else Checked(base)
        make = partial(Classifier, adaptation=self.adaptation, dtype=_DTYPES[config.dtype], device=self.device)
        self.classifier = warmed(self.device, partial(self._rehearse, make), lambda: make(architecture, base=read, trainable=trainable))
        self.base_checksums: Checksums = read.found
        self.trainer = self.start(None)

    @classmethod
    def from_pretrained(
        cls, folder: Path, config: ClassifyConfig, *, device: torch.device | str = "cpu", group: Group = ALONE
    ) -> "ClassifyPipeline":
        """A fresh adapter and head on a Hugging Face checkpoint's folder or an .apr file.

        Raises what `load_checkpoint` and `load_tokenizer` raise, and a ValueError for weights that are not finite.
        """
        place = resolve_device(device) if isinstance(device, str) else device
        tokens = load_tokenizer(folder, config.max_seq_len, config.padding_side)
        checkpoint = load_checkpoint(folder)
        trainable = initial_trainable(checkpoint.config, Adaptation.of(config), config.seed)
        pipeline = cls(checkpoint.config, config, checkpoint.tensors, trainable, tokens, device=place, source=folder, group=group)
        if (found := spoiled_parameter(pipeline.classifier)) is not None:
            raise ValueError(f"{folder}: {found}; every weight must be finite")
        return pipeline

    @classmethod
    def from_apr(
        cls, path: Path, config: ClassifyConfig, *, device: torch.device | str = "cpu", group: Group = ALONE
    ) -> "ClassifyPipeline":
        """A fresh adapter and head on the decoder in `MODEL.apr`, with the tokenizer in `MODEL.tokenizer.json` beside it.

        Raises as `from_pretrained` does, and a ValueError for a path that does not end with .apr.
        """
        if not is_apr(path):
            raise ValueError(f"{path}: expected a file whose name ends with .apr; folders are for from_pretrained")
        return cls.from_pretrained(path, config, device=device, group=group)

    @classmethod
    def from_random(
        cls, architecture: DecoderConfig, config: ClassifyConfig, *, device: torch.device | str = "cpu", group: Group = ALONE
    ) -> "ClassifyPipeline":
        """Random base weights from the settings' seed, and the bytes of a text as its tokens."""
        base = random_tensors(architecture, config.seed)
        trainable = initial_trainable(architecture, Adaptation.of(config), config.seed)
        tokens = ByteTokens(config.max_seq_len, config.padding_side)
        return cls(architecture, config, base, trainable, tokens, device=device, group=group)

    @classmethod
    def from_adapter(
        cls, folder: Path, model: Path | None = None, *, device: torch.device | str = "cpu", group: Group = ALONE
    ) -> "ClassifyPipeline":
        """A saved adapter on its base, or on the checkpoint `model`, with its own settings. Raises as `open_adapter` does."""
        return cls._of(open_adapter(folder, model), device, group)

    @classmethod
    def from_merged(cls, folder: Path, *, device: torch.device | str = "cpu", group: Group = ALONE) -> "ClassifyPipeline":
        """What `merge` wrote, which answers and is evaluated as the adapter was; it is not trained. Raises as `open_merged` does."""
        return cls._of(open_merged(folder), device, group)

    @classmethod
    def from_saved(
        cls, folder: Path, model: Path | None = None, *, device: torch.device | str = "cpu", group: Group = ALONE
    ) -> "ClassifyPipeline":
        """An adapter or a merged model, by what the folder holds.

        Raises a ValueError for a folder of neither, and for a `model` beside a merged one.
        """
        if not is_merged(folder):
            return cls.from_adapter(folder, model, device=device, group=group)
        if model is not None:
            raise ValueError(f"{folder} is a merged model with weights of its own; leave the base {model} out")
        return cls.from_merged(folder, device=device, group=group)

    @classmethod
    def _of(cls, saved: Saved, device: torch.device | str, group: Group) -> "ClassifyPipeline":
        return cls(
            saved.architecture,
            saved.config,
            saved.base,
            saved.adapter.trainable,
            saved.tokens,
            adaptation=saved.adapter.adaptation,
            device=device,
            source=saved.source,
            group=group,
        )

    def start(self, total_steps: int | None, class_weights: Sequence[float] | None = None) -> Trainer:
        """A new trainer, with moments of zero, at the settings' schedule over that many steps, or at their rate without an end.

        `class_weights` are what one of `BALANCED` stands for; without them the trainer has those of the last run that began.
        """
        self.trainer = self._trainer(self.classifier, total_steps, class_weights or self.class_weights, self.group)
        return self.trainer

    def _trainer(self, classifier: Classifier, total_steps: int | None, class_weights: Sequence[float] | None, group: Group) -> Trainer:
        config = self.config
        make = partial(FusedTrainer, longest=config.max_seq_len) if self._backend()[0] else Trainer
        return make(
            classifier,
            total_steps=total_steps,
            micro_batch=config.batch_size,
            learning_rate=config.learning_rate,
            warmup_fraction=config.warmup_fraction,
            schedule=config.schedule,
            weight_decay=config.weight_decay,
            max_norm=config.gradient_clip_norm,
            class_weights=None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32, device=self.device),
            multi_label=config.multi_label,
            group=group,
        )

    def _rehearse(self, make: Callable[..., Classifier]) -> None:
        """What steps and answers compute, in the dtype and widths of the model, on two layers with constants for weights."""
        config, shape = self.config, small(self.architecture)
        base = Constant(base_shapes(shape), _DTYPES[config.dtype], self.device)
        trainable = Constant(trainable_shapes(shape, self.adaptation), torch.float32, self.device)
        weights = None if config.class_weights is None else (1.0,) * config.num_classes  # large ones would end it with a loss of infinity
        trainer = self._trainer(make(shape, base=base, trainable=trainable), None, weights, ALONE)
        for size, seq in SHAPES:
            ids = torch.zeros(size, min(seq, config.max_seq_len), dtype=torch.int64, device=self.device)
            labels = torch.zeros(size, config.num_classes, dtype=torch.float32, device=self.device) if config.multi_label else ids[:, 0]
            batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), labels)
            trainer.forward_only(batch, probabilities=True)
            if not self.merged:
                trainer.train_batch(batch)

    def encode(self, texts: Texts) -> list[list[int]]:
        """The token ids of each text. Raises as `require_texts` does."""
        require_texts(texts)
        return [self.tokens.encode(text) for text in texts]

    @property
    def learning_rate(self) -> float:
        """The rate of the next step, which can be set."""
        return self.trainer.learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.trainer.learning_rate = rate

    def train_step(self, sample: Sample | Samples) -> BatchResult:
        """One optimiser step on one sample. Raises as `Trainer.train_step` does."""
        return self._ready().train_step(self._batch([sample] if isinstance(sample, Sample) else sample))

    def train_batch(self, samples: Given) -> BatchResult:
        """One optimiser step on the mean over the samples, in micro-batches of `batch_size`. Raises as `Trainer.train_batch` does."""
        return self._ready().train_batch(self._batch(samples))

    def accumulate(self, samples: Given) -> BatchResult:
        """Adds the samples to those that the next `apply` steps on."""
        return self._ready().accumulate(self._batch(samples))

    def apply(self) -> BatchResult:
        """One optimiser step on the mean over all accumulated samples."""
        return self.trainer.apply()

    def gradient_vector(self) -> Tensor:
        """The mean gradient over the accumulated samples: per layer A then B, then head weight, head bias."""
        return self.trainer.gradient_vector()

    def apply_gradient_vector(self, vector: Tensor) -> BatchResult:
        """One optimiser step with a gradient in that order. Raises a ValueError for another length, and nothing has changed."""
        return self._ready().apply_gradient_vector(vector)

    def forward_only(self, samples: Given, probabilities: bool = False) -> BatchResult:
        """Mean loss and accuracy, and the probabilities where asked for; changes nothing."""
        return self.trainer.forward_only(self._batch(samples), probabilities) if len(samples) else BatchResult(math.nan, 0, 0)

    def probabilities(self, texts: Texts) -> Tensor:
        """The probability of each class, [texts, classes], on the CPU; with `multi_label` each by itself.

        Raises as `evaluate` does where the model computes what is not finite.
        """
        return self.answers(texts)[1]

    def predict(self, texts: Texts) -> Classes:
        """The class of each text; with `multi_label` one 0 or 1 for each class."""
        return self.answers(texts)[0]

    def answers(self, texts: Texts) -> tuple[Classes, Tensor]:
        """What `predict` and `probabilities` give, by one pass over the texts. The classes are those of the logits: a probability may be
        rounded to a half, or to that of another class."""
        logits, several = self._logits(texts), self.config.multi_label
        found = classes_of(logits, several).tolist()
        return [tuple(row) for row in found] if several else found, class_probabilities(logits, several)

    def evaluate(self, samples: Given) -> Evaluation:
        """Loss, accuracy, scores by class and confusion; changes nothing. Raises a ValueError without samples."""
        return evaluate(self.trainer, self._samples(samples), self.tokens, self.device)

    def fit(
        self,
        train: Given,
        validation: Given | None,
        output: Path,
        *,
        resume: bool = False,
        save_every: int | None = None,
        on_step: OnStep | None = None,
        on_epoch: OnEpoch | None = None,
    ) -> FitResult:
        """A whole run, as `impl.fit.fit` says. Without validation samples `validation_fraction` of the training samples are kept for it."""
        self._require_updates()
        given, apart = self._samples(train), None if validation is None else self._samples(validation)
        samples, held_out = training_and_validation(given, apart, self.config.validation_fraction, self.config.seed)
        try:
            return fit(self, samples, held_out, output, resume=resume, save_every=save_every, on_step=on_step, on_epoch=on_epoch)
        finally:
            self.start(None)

    def save(self, folder: Path) -> None:
        """The adapter and head in PEFT's format with the settings beside; a folder that holds an adapter is replaced."""
        self._require_updates()
        known, extra = self.base_checksums, self._extra()
        save_adapter(folder, self.architecture, self.adaptation, self._trainable(), base=self.source, extra=extra, base_checksums=known)

    def merge(self, folder: Path) -> None:
        """A plain Hugging Face checkpoint with the updates in its weights, and the head beside. Raises a FileExistsError."""
        self._require_updates()
        stored = random_tensors(self.architecture, self.config.seed) if self.source is None else load_checkpoint(self.source).tensors
        base = Checked(stored, self.base_checksums, self.source, "the adapter")
        adapter = Adapter(self.adaptation, self._trainable(), self.source, self._extra())
        save_merged(folder, Checkpoint(self.architecture, base), adapter, source=self.source, quantized_as=_DTYPES[self.config.dtype])

    def summary(self) -> str:
        """Model, device, tokens, LoRA and numbers of parameters, a line each."""
        shape, config = self.architecture, self.config
        trainable = sum(math.prod(each) for each in trainable_shapes(shape, self.adaptation).values())
        frozen = sum(math.prod(each) for each in base_shapes(shape).values())
        held = sum(tensor.nbytes for tensor in (*self.classifier.parameters(), *self.classifier.buffers()))
        own = sum(tensor.nbytes for tensor in self.classifier.trainable_parameters().values())
        base = ("NF4 with double quantisation" if config.double_quantize else "NF4") if config.quantize_nf4 else config.dtype
        lines = {
            "model": f"{shape.family}, {shape.layers} layers, hidden {shape.hidden}, {self.source or 'random weights'}",
            "device": f"{self.device}{self._untested()}, {config.dtype}, base weights in {base}",
            "kernels": dispatch.describe_backend(self.device),
            "steps": self._steps(),
            "tokens": f"{self.tokens.description}, at most {config.max_seq_len}, padded on the {config.padding_side}",
            "LoRA": f"rank {config.lora_rank}, alpha {config.lora_alpha:g}, on {', '.join(target_modules(config.lora_targets))}"
            + (", merged into the base weights" if self.merged else ""),
            "head": f"{config.num_classes} {'labels' if config.multi_label else 'classes'}, {config.pooling} pooling",
            "parameters": f"{trainable:,} trainable, {frozen:,} frozen",
            "weights": f"{own:,} bytes trainable, {held - own:,} bytes frozen",
        }
        return "\n".join(f"{name + ':':<12}{text}" for name, text in lines.items())

    def _untested(self) -> str:
        return (
            "" if self.device.type in TESTED else " (no claim was ever asked on this kind of device, and its memory figures are not known)"
        )

    def _backend(self) -> tuple[bool, str | None]:
        """As `backend_of` has it; what was saved is opened also where the backend that trained it cannot run."""
        if self.merged:
            return False, None
        any_other = self._opened and self.config.backend == "fused"
        config = dataclasses.replace(self.config, backend="auto") if any_other else self.config
        return backend_of(config, self.architecture, self.device)

    def _steps(self) -> str:
        """What computes training steps, in words."""
        if self.merged:
            return "none: a merged model is not trained"
        fused, reason = self._backend()
        if fused:
            return "hand-written layers in CUDA graphs" if self.device.type == "cuda" else "hand-written layers"
        return f"automatic differentiation ({reason})" if reason else "automatic differentiation"

    def _trainable(self) -> dict[str, Tensor]:
        return {name: parameter.detach().cpu() for name, parameter in self.classifier.trainable_parameters().items()}

    def _extra(self) -> dict[str, Any]:
        """What comes back with a saved adapter or merged model: the settings, with class weights as numbers once a run has made them."""
        weights = self.class_weights or self.config.class_weights
        extra: dict[str, Any] = {"settings": {**dataclasses.asdict(self.config), "class_weights": weights}}
        return extra if self.source is not None else extra | {RANDOM: dataclasses.asdict(self.architecture)}

    def _require_updates(self) -> None:
        if self.merged:
            raise ValueError(f"{self.source} is a merged model: its updates are in its weights; train, save and merge from the adapter")

    def _samples(self, given: Given) -> Samples:
        if isinstance(given, Samples):
            given.require_read_with(self.config, "")
            return given
        return tokenize(given, self.tokens, self.config.num_classes, self.config.multi_label)

    def _batch(self, given: Given) -> Batch:
        samples = self._samples(given)
        return samples.batch(range(len(samples)), self.tokens, self.device)

    def _ready(self) -> Trainer:
        self._require_updates()
        if isinstance(self.config.class_weights, str) and self.class_weights is None:
            kind = self.config.class_weights
            raise ValueError(f"class_weights is {kind!r}, which fit() takes from the training samples; single steps need numbers")
        return self.trainer

    @torch.no_grad()
    def _logits(self, texts: Texts) -> Tensor:
        require_texts(texts)
        size, logits = self.config.batch_size, []
        for start in range(0, len(texts), size):
            input_ids, mask = self.tokens.batch(texts[start : start + size])
            logits.append(self.classifier(input_ids.to(self.device), mask.to(self.device)).cpu())
            require_finite("logits", logits[-1])
        return torch.cat(logits) if logits else torch.empty(0, self.config.num_classes, dtype=torch.float32, device="cpu")


def _require_fitting(architecture: DecoderConfig, config: ClassifyConfig, tokens: Tokens) -> None:
    if tokens.vocab > architecture.vocab:
        raise ValueError(
            f"{tokens.description}: the model has {architecture.vocab} embeddings, and ids of tokens go up to {tokens.vocab - 1}"
        )
    if config.max_seq_len > architecture.max_positions:
        raise ValueError(f"max_seq_len is {config.max_seq_len}: the model was made for at most {architecture.max_positions} positions")
