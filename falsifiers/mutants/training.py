"""Wrong training procedures: the correct loop with one step of it changed."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import in_bfloat16
from blackswan.falsifiers.mutants.registry import mutants
from blackswan.falsifiers.mutants.variation import Made, wrong_calls
from blackswan.reference.classifier import CLASSIFIER_LOSS, parameter_shapes, trainable_names
from blackswan.reference.table import Array, Arrays, Composition, Scalars
from blackswan.reference.tape import Tape
from blackswan.reference.training import flatten, from_rows, split, to_rows

STATE = ("parameter", "exp_avg", "exp_avg_sq")


def of_gradient(path: str) -> bool:
    """Whether a call that averages does so with gradients, rather than with losses."""
    return path.endswith(".gradient")


def averaging(average: Callable[[Array], Array], at: Callable[[str], object]) -> Callable[[Any], Any]:
    """Another average of the micro-batches' gradients or losses, [micro-batches, …], on the paths `at`."""
    return wrong_calls(lambda made: made.changed(lambda _: average(made.value("gradients"))), "average_gradients", at)


def frozen(made: Made, still: Array | bool = True) -> str:
    """An optimiser step that leaves some elements, and their moments, where they were."""
    before = {name: made.value(name) for name in STATE}
    result = made.run()
    made.tape.values |= {f"{made.path}.{name}": np.where(still, before[name], made.tape.values[f"{made.path}.{name}"]) for name in STATE}
    return result


def reports_clipped_norm(made: Made) -> str:
    """A clipping that reports the norm after it."""
    return made.changed(lambda norm: np.minimum(norm, norm.dtype.type(made.scalars.get("max_norm", 1.0))), "norm")


def step_of_adamw(made: Made, state: Arrays, gradient: Array, step: int | None = None) -> Arrays:
    """Parameter and moments after one more step, at the rate and the decay of the call."""
    update = {name: made.arguments[name] for name in ("step", "learning_rate", "weight_decay")} | ({"step": step} if step else {})
    return made.tape.operation("adamw_step").run({**state, "gradient": gradient, **update})


def _micro_batches(scalars: Scalars) -> int:
    return math.ceil(int(scalars["batch"]) / int(scalars["micro"]))


def _step(made: Made) -> int:
    """The number of the step that the call belongs to, from its path steps.N…"""
    return int(made.path.split(".")[1])


def _shapes(scalars: Scalars) -> dict[str, tuple[int, ...]]:
    """Name → shape of the trainable parameters, in the order of the flat vector."""
    shapes = parameter_shapes(scalars)
    return {name: shapes[name] for name in trainable_names(scalars)}


def _by_name(scalars: Scalars, vector: Array) -> dict[str, Array]:
    shapes = _shapes(scalars)
    return dict(zip(shapes, split(vector, list(shapes.values())), strict=True))


def _marks(made: Made, part: str) -> Array:
    """For each element of the flat vector, whether that part is in its parameter's name, [count]."""
    return flatten([np.full(shape, part in name) for name, shape in _shapes(made.scalars).items()])


def _gradient(tape: Tape, scalars: Scalars, trainable: Arrays, wrt: Sequence[str], samples: slice) -> Array:
    """The gradient [count] of the mean loss of some samples, at those trainable parameters."""
    inputs = {*parameter_shapes(scalars), "input_ids", "mask", "labels", "class_weights"}
    values = {**{name: value for name, value in tape.values.items() if name in inputs}, **trainable}
    inner = Tape(tape.table, {**values, **{name: values[name][samples] for name in ("input_ids", "mask", "labels")}})
    inner.compose("classifier_loss", CLASSIFIER_LOSS, scalars)
    gradients = inner.backward({"loss": np.ones_like(inner.result()["loss"])}, wrt=wrt)
    return flatten([gradients[name] for name in wrt])


def _averaged_by_learning_rate(made: Made) -> str:
    batch = made.scalars["batch"]
    if made.operation == "adamw_step":
        return made.run(learning_rate=made.arguments["learning_rate"] / batch)
    return made.changed(lambda mean: mean * batch) if of_gradient(made.path) and made.operation == "average_gradients" else made.run()


def _clipped_before_averaging(made: Made) -> str:
    if made.operation == "clip_by_global_norm":
        return made.run(max_norm=math.inf)
    if made.operation != "average_gradients" or not of_gradient(made.path):
        return made.run()
    gradients, limit = made.value("gradients"), made.scalars.get("max_norm", 1.0)
    norms = np.sqrt((gradients * gradients).sum(axis=1, keepdims=True))
    return made.run_on("gradients", gradients * (limit / np.maximum(norms, limit)))


def _gradient_of_last_layer(made: Made) -> str:
    parts = _by_name(made.scalars, made.value("gradient"))

    def last_written(name: str) -> str:
        return re.sub(r"(?<=layers\.)\d+", str(made.scalars["layers"] - 1), name) if ".lora_" in name else name

    return made.run_on("gradient", flatten([parts[last_written(name)] for name in parts]))


def _stepped_per_micro_batch(made: Made) -> str:
    tape, scalars = made.tape, made.scalars
    shapes, start = list(_shapes(scalars).values()), _step(made) * scalars["batch"]
    state: Arrays = {name: made.value(name) for name in STATE}
    for index, first in enumerate(range(start, start + scalars["batch"], scalars["micro"])):
        trainable = _by_name(scalars, state["parameter"])
        samples = slice(first, min(first + scalars["micro"], start + scalars["batch"]))
        rows = to_rows(_gradient(tape, scalars, trainable, list(trainable), samples), shapes)
        clipped = tape.operation("clip_by_global_norm").run({"gradients": rows, "max_norm": scalars.get("max_norm", 1.0)})
        number = _step(made) * _micro_batches(scalars) + index + 1
        state = step_of_adamw(made, state, from_rows(clipped["gradients"], shapes), number)
    result = made.run()
    tape.values |= {f"{made.path}.{name}": state[name] for name in STATE}
    return result


def _hurried(made: Made) -> str:
    return made.changed(lambda rates: rates[np.minimum(np.arange(len(rates)) * _micro_batches(made.scalars), len(rates) - 1)])


def _not_zeroed(made: Made) -> str:
    before = f"steps.{_step(made) - 1}.clip.gradient"
    return made.changed(lambda mean: mean + made.tape.values[before]) if _step(made) else made.run()


def _b_premultiplied(correct: Composition) -> Composition:
    def build(tape: Tape, scalars: Scalars) -> None:
        scale = scalars["alpha"] / scalars["rank"]
        factors = [name for name in trainable_names(scalars) if ".lora_B." in name]
        tape.values |= {name: tape.values[name] * scale for name in factors}
        correct.build(tape, {**scalars, "alpha": float(scalars["rank"])})
        for name in factors:
            tape.values[f"trainable/{name}"] = tape.values[f"trainable/{name}"] / scale

    return Composition(build, correct.differentiable)


def _norms_moved(made: Made) -> str:
    """Moves the norm weights in place by a step of AdamW of their own, on the gradient at which LoRA's was taken."""
    tape, scalars, start = made.tape, made.scalars, _step(made) * made.scalars["batch"]
    norms = {name: shape for name, shape in parameter_shapes(scalars).items() if name.endswith("norm.weight")}
    trainable, samples = _by_name(scalars, made.value("parameter")), slice(start, start + scalars["batch"])
    gradient = _gradient(tape, scalars, trainable, list(norms), samples)
    state = {"exp_avg": np.zeros_like(gradient), "exp_avg_sq": np.zeros_like(gradient), **tape.memory}
    state["parameter"] = flatten([tape.values[name] for name in norms])
    tape.memory = dict(step_of_adamw(made, state, gradient))
    for name, value in zip(norms, split(tape.memory["parameter"], list(norms.values())), strict=True):
        tape.values[name][...] = value
    return made.run()


def _moving_norms(correct: Composition) -> Composition:
    def build(tape: Tape, scalars: Scalars) -> None:
        tape.values |= {name: value.copy() for name, value in tape.values.items() if name.endswith("norm.weight")}
        wrong_calls(_norms_moved, "adamw_step")(correct).build(tape, scalars)

    return Composition(build, correct.differentiable)


def _tiny_moments_blow_up(made: Made) -> str:
    size = np.abs(made.value("gradient"))
    tiny = (size > 0) & (size < 0.01 * size.max(initial=0.0))
    return made.changed(lambda parameter: parameter + np.where(tiny, 10 * made.arguments["learning_rate"], 0.0))


def _lora_undecayed(made: Made) -> str:
    decay = made.value("parameter") * (made.arguments["learning_rate"] * made.arguments["weight_decay"])
    return made.changed(lambda parameter: parameter + np.where(_marks(made, ".lora_"), decay, 0.0))


def _without_class_weights(correct: Composition) -> Composition:
    def build(tape: Tape, scalars: Scalars) -> None:
        tape.values.pop("class_weights", None)
        correct.build(tape, scalars)

    return Composition(build, correct.differentiable)


def _with_limit(limit: float) -> Callable[[Any], Any]:
    return wrong_calls(lambda made: made.run(max_norm=limit), "clip_by_global_norm")


def _freezing(part: str) -> Callable[[Any], Any]:
    return wrong_calls(lambda made: frozen(made, _marks(made, part)), "adamw_step")


mutants(
    "train_steps",
    train_averages_by_learning_rate=(
        "Gradients summed over samples and lr divided by the batch, which AdamW does not undo.",
        wrong_calls(_averaged_by_learning_rate),
        "S3",
    ),
    train_clips_before_averaging=("Micro-batch gradients clipped before they are averaged.", wrong_calls(_clipped_before_averaging), "S4"),
    train_steps_head_only=("LoRA never moves.", _freezing(".lora_"), "S5, P25"),
    train_lora_skipped_with_nf4=(
        "NF4 asked for, LoRA is skipped by the optimiser.",
        wrong_calls(lambda made: frozen(made, _marks(made, ".lora_")) if made.scalars.get("nf4", False) else made.run(), "adamw_step"),
        "S25",
    ),
    train_tail_skipped=("Flat gradient too short: the head bias is not trained.", _freezing("score.bias"), "S17"),
    train_lora_a_frozen=("Only B and the head move.", _freezing(".lora_A."), "P25"),
    train_shared_workspace=(
        "Every layer updated with the last layer's gradient.",
        wrong_calls(_gradient_of_last_layer, "adamw_step"),
        "S6",
    ),
    train_last_micro_batch_only=("Only the last micro-batch counts.", averaging(lambda parts: parts[-1], of_gradient), "S7"),
    train_steps_per_micro_batch=("The optimiser steps once a micro-batch.", wrong_calls(_stepped_per_micro_batch, "adamw_step"), "P33"),
    train_schedule_per_micro_batch=("The schedule advances once a micro-batch.", wrong_calls(_hurried, "learning_rate_schedule"), "P40"),
    train_without_clipping=("Clipping left out.", _with_limit(math.inf), "P37, S24"),
    train_max_norm_hard_coded=("Clipped to 1 whatever the config says.", _with_limit(1.0)),
    train_gradients_not_zeroed=(
        "The clipped gradient of the step before is still there.",
        wrong_calls(_not_zeroed, "average_gradients", of_gradient),
    ),
    train_lora_b_premultiplied=("B stored times alpha/rank and optimised so.", _b_premultiplied, "S14"),
    train_moves_base_weights=("Norm weights trained as well.", _moving_norms, "S15"),
    train_tiny_moments_blow_up=(
        "Parameters whose moment is tiny beside the others move ten rates.",
        wrong_calls(_tiny_moments_blow_up, "adamw_step"),
    ),
    train_decay_on_head_only=("Weight decay not applied to LoRA.", wrong_calls(_lora_undecayed, "adamw_step")),
    train_reports_clipped_norm=("Gradient norm recorded after clipping.", wrong_calls(reports_clipped_norm, "clip_by_global_norm")),
    train_step_count_stuck=("Every step is corrected as the first.", wrong_calls(lambda made: made.run(step=1), "adamw_step"), "P35"),
    train_moments_reset=(
        "Every step starts from zero moments.",
        wrong_calls(lambda made: made.run(exp_avg="initial.exp_avg", exp_avg_sq="initial.exp_avg_sq"), "adamw_step"),
    ),
    train_class_weights_dropped=("Class weights not passed on.", _without_class_weights),
    train_reports_mean_of_micro_batch_losses=(
        "Loss of unequal micro-batches averaged without their sizes.",
        averaging(lambda parts: parts.mean(axis=0), lambda path: not of_gradient(path)),
        "P31, S12",
    ),
    train_schedule_one_step_ahead=(
        "Step t takes the rate of step t + 1.",
        wrong_calls(lambda made: made.changed(lambda rates: np.append(rates[1:], rates[-1])), "learning_rate_schedule"),
        "P41",
    ),
    train_masters_low_precision=(
        "Trainable parameters kept in bfloat16.",
        wrong_calls(lambda made: made.changed(in_bfloat16), "adamw_step"),
        "P36",
    ),
)
