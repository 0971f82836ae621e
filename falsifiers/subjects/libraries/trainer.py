"""transformers' Trainer on a model with a head of classes, with LoRA of PEFT and NF4 of bitsandbytes, as users build them.

The head is given a bias, as the problems have one. It lacks settings without a counterpart, and runs that are killed, shared or continued.
"""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

from blackswan.falsifiers.subjects.conversion import to_numpy
from blackswan.falsifiers.subjects.doors.training import Corpus, Epoch, Kept, Plan, Problem, Rank, Read, Result, Run, State, Step
from blackswan.falsifiers.subjects.libraries.classifiers import TARGETS, configuration, plain_name
from blackswan.falsifiers.subjects.protocol import Lacks
from blackswan.reference.table import Array

PREFIX = "base_model.model."
DEFAULTS: dict[str, Any] = {
    **{"accumulation_steps": 1, "class_weights": None, "early_stop_patience": None, "gradient_clip_norm": 1.0, "multi_label": False},
    **{"schedule": "linear", "seed": 0, "warmup_fraction": 0.06, "weight_decay": 0.01, "quantize_nf4": False, "double_quantize": False},
    **{"padding_side": "right", "dtype": "float32", "backend": "torch", "max_seq_len": 512},
}
"""Settings that a problem may leave open."""
REQUIRED = ("num_classes", "lora_rank", "lora_alpha", "lora_targets", "pooling", "batch_size", "epochs", "learning_rate")
ALONE = {"pooling": ("last",), "dtype": ("float32",), "backend": ("auto", "torch")}
"""Settings of which it has these values alone."""
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
QUESTIONS = {
    "settings": "continues a run with other settings than those that it was begun with, and refuses none",
    "pipeline": "makes whole runs, and has no calls on single batches",
    "fit_files": "reads no corpus",
    "shares": "has the workers of accelerate, which need a launcher",
    "mixed": "has the workers of accelerate, which need a launcher",
    "steps_in_parallel": "has the workers of accelerate, which need a launcher",
}
"""Questions that it has no answer to, and what it does instead."""


class TrainingRuns:
    """The door `trainer`, see the protocol of that name. Without `accumulate` a step's samples are one micro-batch."""

    backends = ("torch",)
    stand_in_backends = ()

    def __init__(self, accumulate: bool, device: torch.device) -> None:
        self._accumulate, self._device = accumulate, device

    def __getattr__(self, name: str) -> Any:
        """Lacks for the other questions of the protocol."""
        if name not in QUESTIONS:
            raise AttributeError(name)
        raise Lacks(f"transformers' Trainer {QUESTIONS[name]}")

    def fit(self, problem: Problem, folder: Path, plan: Plan) -> Run:
        """A run in that folder."""
        if plan != Plan(poison_after=plan.poison_after) or problem.parameters is None:
            raise Lacks(
                "runs of transformers' Trainer are asked whole here: in one process, not killed, continued or saved within an epoch"
            )
        settings = _settings(problem)
        if not self._accumulate:
            settings |= {"batch_size": settings["batch_size"] * settings["accumulation_steps"], "accumulation_steps": 1}
        with torch.random.fork_rng():
            model = _model(problem.architecture, problem.parameters, settings, self._device)
            before, quantised = _frozen(model), _quantised(model)
            trainer = _Watched(model, settings, problem, folder, plan.poison_after)
            trainer.train()
        notes = trainer.notes
        ranks = [Rank("", notes.steps[-1].state, [])]
        return Run(notes.reads, notes.steps, notes.epochs, ranks, _result(trainer), "", (before, _frozen(model)), quantised)

    def kept(self, folder: Path) -> Kept:
        """Reads the checkpoints of the last and the best epoch."""
        last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        progress = json.loads((last / "trainer_state.json").read_text())
        trainable, best = _adapter(last), progress["best_global_step"]
        state = {f"trainable/{name}": value for name, value in trainable.items()}
        return Kept(state, {"step": progress["global_step"]}, _adapter(folder / f"checkpoint-{best}") if best else {}, trainable)


def _settings(problem: Problem) -> dict[str, Any]:
    """All settings. Lacks for one without a counterpart."""
    given = {**DEFAULTS, **problem.settings}
    for name, value in given.items():
        if name not in DEFAULTS and name not in REQUIRED:
            raise Lacks(f"transformers' Trainer has no counterpart of {name}")
        if value not in ALONE.get(name, (value,)):
            raise Lacks(f"transformers' classification heads and Trainer have no {name} {value}")
    if given["warmup_fraction"] == 1:
        raise Lacks("transformers' Trainer takes a warm-up of 1 for one step")
    longest = max(map(len, problem.training.rows))
    if longest > given["max_seq_len"]:
        raise Lacks(f"transformers' Trainer cuts no samples; one has {longest} tokens, and max_seq_len is {given['max_seq_len']}")
    return given


def _model(architecture: Mapping[str, Any], parameters: Mapping[str, Array], settings: Mapping[str, Any], device: torch.device) -> Any:
    """The base model with those parameters, LoRA and head."""
    from peft import LoraConfig, get_peft_model

    kind = "multi_label_classification" if settings["multi_label"] else "single_label_classification"
    head = {"num_labels": settings["num_classes"], "problem_type": kind, "pad_token_id": architecture["vocab"] - 1}
    base: Any = AutoModelForSequenceClassification.from_config(configuration(architecture, "sdpa", **head))  # type: ignore[no-untyped-call]
    given = {name: torch.tensor(value, dtype=torch.float32) for name, value in parameters.items()}
    base.load_state_dict({name: given[name] for name in base.state_dict()})
    base = _in_nf4(base, settings["double_quantize"]) if settings["quantize_nf4"] else base
    base.score = nn.Linear(architecture["hidden"], settings["num_classes"])
    lora = LoraConfig(
        task_type="SEQ_CLS", r=settings["lora_rank"], lora_alpha=settings["lora_alpha"], target_modules=TARGETS[settings["lora_targets"]]
    )
    model: Any = get_peft_model(base.to(device), lora)
    with torch.no_grad():
        for name, value in _trained(model).items():
            value.copy_(given[name])
    return model


def _in_nf4(base: Any, double: bool) -> Any:
    """The model as `from_pretrained` quantises it."""
    from peft import prepare_model_for_kbit_training

    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=torch.float32
    )
    disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        quantised = type(base).from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    return prepare_model_for_kbit_training(quantised, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]


class _Watched(Trainer):
    """A Trainer whose batches, losses and norms are noted."""

    def __init__(self, model: Any, settings: Mapping[str, Any], problem: Problem, folder: Path, poison_after: int | None) -> None:
        steps = -(-len(problem.training) // (settings["batch_size"] * settings["accumulation_steps"]))
        self.notes, self.steps_per_epoch = _Notes(model, steps, poison_after), steps
        patience = settings["early_stop_patience"]
        super().__init__(
            model,
            _arguments(settings, folder, problem.validation is not None, next(model.parameters()).is_cpu),
            _collate(problem.architecture["vocab"] - 1, settings),
            _rows(problem.training),
            None if problem.validation is None else _rows(problem.validation),
            compute_loss_func=_weighted_loss(settings, problem.training),
            callbacks=[self.notes, *([EarlyStoppingCallback(patience)] if patience else [])],
        )
        self.remove_callback(PrinterCallback)
        clip = self.accelerator.clip_grad_norm_

        def noted(*given: Any, **named: Any) -> Any:
            norm = clip(*given, **named)
            self.notes.norm = float(norm)
            return norm

        self.accelerator.clip_grad_norm_ = noted

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """A micro-batch; its loss is what the Trainer adds to that of the step."""
        self.notes.read(inputs, self.state.global_step + 1, trained=True)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.notes.loss += loss.item()
        return loss

    def prediction_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """A batch of an evaluation."""
        self.notes.read(inputs, self.state.global_step + 1, trained=False)
        return super().prediction_step(model, inputs, *given, **named)


class _Notes(TrainerCallback):
    """The record of a run."""

    def __init__(self, model: Any, steps_per_epoch: int, poison_after: int | None) -> None:
        self.trained, self.steps_per_epoch, self.poison_after = _trained(model), steps_per_epoch, poison_after
        self.reads: list[Read] = []
        self.steps: list[Step] = []
        self.epochs: list[Epoch] = []
        self.loss = self.norm = self.rate = 0.0

    def read(self, inputs: Mapping[str, Tensor], step: int, trained: bool) -> None:
        """Notes the samples of a batch."""
        for ids, mask, label in zip(inputs["input_ids"], inputs["attention_mask"], inputs["labels"].tolist(), strict=True):
            own = tuple(map(int, label)) if isinstance(label, list) else label
            self.reads.append(Read(step, trained, (tuple(ids[mask.bool()].tolist()), own)))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The rate of the step, before the schedule goes on."""
        del args, state, control
        self.rate = given["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Notes the step; plants the NaN where one is asked for."""
        del args, control
        number, epoch = state.global_step, 1 + (state.global_step - 1) // self.steps_per_epoch
        samples = sum(read.trained and read.step == number for read in self.reads)
        content = self._content(given["optimizer"].state, number)
        self.steps.append(Step(number, epoch, self.loss, self.norm, self.rate, samples, content))
        self.loss = 0.0
        if number == self.poison_after:
            self.trained["score.bias"].data[0] = float("nan")

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Notes the epoch, whose losses are logged before it is saved."""
        del args, control, given
        logged = {name: value for entry in state.log_history if entry["step"] == state.global_step for name, value in entry.items()}
        best = state.best_global_step == state.global_step
        self.epochs.append(Epoch(len(self.epochs) + 1, logged["loss"], logged.get("eval_loss"), best, self.steps[-1].state))

    def _content(self, moments: Mapping[Any, Mapping[str, Tensor]], step: int) -> State:
        found: State = {"step": np.asarray(step)}
        for name, value in self.trained.items():
            tensors = {"trainable": value, **{group: moments[value][group] for group in ("exp_avg", "exp_avg_sq")}}
            found |= {f"{group}/{name}": to_numpy(tensor.clone()) for group, tensor in tensors.items()}
        return found


def _arguments(settings: Mapping[str, Any], folder: Path, validated: bool, on_cpu: bool) -> TrainingArguments:
    best = {"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False}
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=settings["batch_size"],
        per_device_eval_batch_size=settings["batch_size"],
        gradient_accumulation_steps=settings["accumulation_steps"],
        num_train_epochs=settings["epochs"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type=SCHEDULES[settings["schedule"]],
        warmup_steps=settings["warmup_fraction"],
        weight_decay=settings["weight_decay"],
        max_grad_norm=settings["gradient_clip_norm"] or math.inf,  # by 0 it would not take the norm
        seed=settings["seed"],
        logging_strategy="epoch",
        save_strategy="epoch",
        **(best if validated else {}),  # type: ignore[arg-type]
        label_names=["labels"],
        remove_unused_columns=False,
        report_to=[],
        use_cpu=on_cpu,
        disable_tqdm=True,
        log_level="error",
    )


def _weighted_loss(settings: Mapping[str, Any], corpus: Corpus) -> Callable[..., Tensor] | None:
    """`compute_loss_func` where there are class weights, as the Trainer documents it: a sum, over the items of the whole step."""
    weights = settings["class_weights"]
    if weights is None:
        return None
    if isinstance(weights, str):  # inverse to the samples of a class, with a mean of 1 over the samples or over the classes
        inverse = 1.0 / np.bincount(np.asarray(corpus.labels), minlength=settings["num_classes"])
        weights = inverse * (len(corpus) / len(inverse) if weights == "balanced" else len(inverse) / inverse.sum())
    numbers = torch.tensor(weights, dtype=torch.float32)

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        logits = outputs["logits"]
        total: Tensor = nn.functional.cross_entropy(logits, labels, numbers.to(logits.device), reduction="sum") / num_items_in_batch
        return total

    return loss


def _rows(corpus: Corpus) -> Any:
    return [{"input_ids": row, "labels": label} for row, label in zip(corpus.rows, corpus.labels, strict=True)]


def _collate(padding: int, settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Pads the rows of a batch to the longest of them."""
    dtype = torch.float32 if settings["multi_label"] else torch.int64

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        given = [torch.tensor(row["input_ids"]) for row in rows]
        ids, mask = (
            nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=value, padding_side=settings["padding_side"])
            for part, value in ((given, padding), ([torch.ones_like(row) for row in given], 0))
        )
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows], dtype=dtype)}

    return collate


def _trained(model: Any) -> dict[str, nn.Parameter]:
    """The trainable parameters by the problem's names."""
    return {plain_name(name): value for name, value in model.named_parameters() if value.requires_grad}


def _frozen(model: Any) -> dict[str, Array]:
    trained = _trained(model)
    return {name: to_numpy(value.clone()) for name, value in model.state_dict().items() if plain_name(name) not in trained}


def _quantised(model: Any) -> dict[str, Array]:
    """The weights that 4-bit layers compute with."""
    from bitsandbytes.functional import dequantize_4bit

    held: dict[str, Any] = {name: getattr(module, "weight", None) for name, module in model.named_modules()}
    found = {name: weight for name, weight in held.items() if getattr(weight, "quant_state", None) is not None}
    plain = {name: name.removeprefix(PREFIX).removesuffix(".base_layer") for name in found}
    return {f"{plain[name]}.weight": to_numpy(dequantize_4bit(weight.data, weight.quant_state)) for name, weight in found.items()}


def _adapter(folder: Path) -> dict[str, Array]:
    return {name.removeprefix(PREFIX): value for name, value in load_file(folder / "adapter_model.safetensors").items()}


def _result(trainer: _Watched) -> Result:
    state, epochs = trainer.state, [{"epoch": epoch.number, "validation_loss": epoch.validation_loss} for epoch in trainer.notes.epochs]
    best = state.best_global_step and state.best_global_step // trainer.steps_per_epoch
    return Result(state.global_step, epochs, best or None, state.best_metric, state.global_step < state.max_steps)
