"""Wrong training procedures: the correct loop with one step of it changed."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from blackswan.falsifiers.mutants.changes import in_bfloat16
from blackswan.falsifiers.mutants.registry import mutant
from blackswan.falsifiers.mutants.variation import Change, Made, varied
from blackswan.reference.classifier import CLASSIFIER_LOSS, parameter_shapes, trainable_names
from blackswan.reference.table import Array, Composition, Scalars
from blackswan.reference.tape import Tape
from blackswan.reference.training import flatten, from_rows, split, to_rows

STATE = ("parameter", "exp_avg", "exp_avg_sq")


def _micro_batches(scalars: Scalars) -> int:
    return math.ceil(int(scalars["batch"]) / int(scalars["micro"]))


def _step(made: Made) -> int:
    """The number of the step that the call belongs to, from its path steps.N…"""
    return int(made.path.split(".")[1])


def _shapes(scalars: Scalars) -> dict[str, tuple[int, ...]]:
    """Name → shape of the trainable parameters, in the order of the flat vector."""
    shapes = parameter_shapes(scalars)
    return {name: shapes[name] for name in trainable_names(scalars)}


def _marks(scalars: Scalars, chosen: Callable[[str], bool]) -> Array:
    """For each element of the flat vector, whether its parameter is chosen, [count]."""
    return flatten([np.full(shape, chosen(name)) for name, shape in _shapes(scalars).items()])


def _on(operation: str, change: Change) -> Change:
    return lambda made: change(made) if made.operation == operation else made.run()


def _with_gradient(made: Made, gradient: Array, **changes: Any) -> str:
    """The call with another value for its argument `gradient`."""
    return made.run(gradient=made.tape.put(f"{made.path}.wrong_gradient", gradient), **changes)


def _is_gradient(made: Made) -> bool:
    """Whether the call averages gradients, rather than the losses."""
    return made.operation == "average_gradients" and made.path.endswith(".gradient")


@mutant("train_steps", "S3")
def train_averages_by_learning_rate(correct: Composition) -> Composition:
    """Gradients summed over samples and lr divided by the batch, which AdamW does not undo."""

    def change_for(scalars: Scalars) -> Change:
        def summed(made: Made) -> str:
            if made.operation == "adamw_step":
                return made.run(learning_rate=made.arguments["learning_rate"] / scalars["batch"])
            result = made.run()
            if _is_gradient(made):
                made.tape.values[result] = made.tape.values[result] * scalars["batch"]
            return result

        return summed

    return varied(correct, change_for)


@mutant("train_steps", "S4")
def train_clips_before_averaging(correct: Composition) -> Composition:
    """Micro-batch gradients clipped before they are averaged."""

    def change_for(scalars: Scalars) -> Change:
        limit = scalars.get("max_norm", 1.0)

        def early(made: Made) -> str:
            if made.operation == "clip_by_global_norm":
                return made.run(max_norm=math.inf)
            if _is_gradient(made):
                gradients = made.tape.values[made.arguments["gradients"]]
                norms = np.sqrt((gradients * gradients).sum(axis=1, keepdims=True))
                clipped = np.where(norms > limit, gradients * (limit / np.maximum(norms, limit)), gradients)
                return made.run(gradients=made.tape.put(f"{made.path}.clipped", clipped))
            return made.run()

        return early

    return varied(correct, change_for)


def _frozen(made: Made, still: Array) -> str:
    """One optimiser step that leaves some elements, and their moments, where they were."""
    before = {name: made.tape.values[made.arguments[name]] for name in STATE}
    result = made.run()
    for name in STATE:
        made.tape.values[f"{made.path}.{name}"] = np.where(still, before[name], made.tape.values[f"{made.path}.{name}"])
    return result


@mutant("train_steps", "S5", "P25")
def train_steps_head_only(correct: Composition) -> Composition:
    """LoRA never moves."""
    return varied(correct, lambda scalars: _on("adamw_step", lambda made: _frozen(made, _marks(scalars, lambda name: ".lora_" in name))))


@mutant("train_steps", "S25")
def train_lora_skipped_with_nf4(correct: Composition) -> Composition:
    """NF4 asked for, LoRA is skipped by the optimiser."""

    def change_for(scalars: Scalars) -> Change:
        lora = _marks(scalars, lambda name: ".lora_" in name)
        return _on("adamw_step", lambda made: _frozen(made, lora) if scalars.get("nf4", False) else made.run())

    return varied(correct, change_for)


@mutant("train_steps", "S17")
def train_tail_skipped(correct: Composition) -> Composition:
    """Flat gradient too short: the head bias is not trained."""
    return varied(
        correct, lambda scalars: _on("adamw_step", lambda made: _frozen(made, _marks(scalars, lambda name: name == "score.bias")))
    )


@mutant("train_steps", "P25")
def train_lora_a_frozen(correct: Composition) -> Composition:
    """Only B and the head move."""
    return varied(correct, lambda scalars: _on("adamw_step", lambda made: _frozen(made, _marks(scalars, lambda name: ".lora_A." in name))))


@mutant("train_steps", "S6")
def train_shared_workspace(correct: Composition) -> Composition:
    """Every layer updated with the last layer's gradient."""

    def change_for(scalars: Scalars) -> Change:
        names, shapes = list(_shapes(scalars)), list(_shapes(scalars).values())

        def last_written(name: str) -> str:
            parts = name.split(".")
            return ".".join([*parts[:2], str(scalars["layers"] - 1), *parts[3:]]) if ".lora_" in name else name

        def shared(made: Made) -> str:
            parts = dict(zip(names, split(made.tape.values[made.arguments["gradient"]], shapes), strict=True))
            return _with_gradient(made, flatten([parts[last_written(name)] for name in names]))

        return _on("adamw_step", shared)

    return varied(correct, change_for)


@mutant("train_steps", "S7")
def train_last_micro_batch_only(correct: Composition) -> Composition:
    """Only the last micro-batch counts."""

    def last(made: Made) -> str:
        result = made.run()
        if _is_gradient(made):
            made.tape.values[result] = made.tape.values[made.arguments["gradients"]][-1]
        return result

    return varied(correct, lambda _: last)


def _gradient(tape: Tape, scalars: Scalars, values: Mapping[str, Array], wrt: Sequence[str], samples: slice) -> Array:
    """The gradient [count] of the mean loss of some samples, at the parameters in `values`."""
    batched = {name: values[name][samples] for name in ("input_ids", "mask", "labels")}
    inner = Tape(tape.table, {**values, **batched})
    inner.compose("classifier_loss", CLASSIFIER_LOSS, scalars)
    gradients = inner.backward({"loss": np.ones_like(inner.result()["loss"])}, wrt=wrt)
    return flatten([gradients[name] for name in wrt])


def _model_inputs(tape: Tape, scalars: Scalars) -> dict[str, Array]:
    names = {*parameter_shapes(scalars), "input_ids", "mask", "labels", "class_weights"}
    return {name: value for name, value in tape.values.items() if name in names}


@mutant("train_steps", "P33")
def train_steps_per_micro_batch(correct: Composition) -> Composition:
    """The optimiser steps once a micro-batch."""

    def change_for(scalars: Scalars) -> Change:
        shapes, batch, micro = _shapes(scalars), scalars["batch"], scalars["micro"]

        def stepped(made: Made) -> str:
            tape, start = made.tape, _step(made) * batch
            state = {name: tape.values[made.arguments[name]] for name in STATE}
            for index, first in enumerate(range(start, start + batch, micro)):
                parameters = dict(zip(shapes, split(state["parameter"], list(shapes.values())), strict=True))
                samples = slice(first, min(first + micro, start + batch))
                gradient = _gradient(tape, scalars, {**_model_inputs(tape, scalars), **parameters}, list(shapes), samples)
                rows = to_rows(gradient, list(shapes.values()))
                clipped = tape.operation("clip_by_global_norm").run({"gradients": rows, "max_norm": scalars.get("max_norm", 1.0)})
                update = {name: made.arguments[name] for name in ("learning_rate", "weight_decay")}
                update |= {"step": _step(made) * _micro_batches(scalars) + index + 1}
                gradient = from_rows(clipped["gradients"], list(shapes.values()))
                state = tape.operation("adamw_step").run({**state, "gradient": gradient, **update})
            result = made.run()
            tape.values |= {f"{made.path}.{name}": state[name] for name in STATE}
            return result

        return _on("adamw_step", stepped)

    return varied(correct, change_for)


@mutant("train_steps", "P40")
def train_schedule_per_micro_batch(correct: Composition) -> Composition:
    """The schedule advances once a micro-batch."""

    def change_for(scalars: Scalars) -> Change:
        def hurried(made: Made) -> str:
            result = made.run()
            rates = made.tape.values[result]
            made.tape.values[result] = rates[np.minimum(np.arange(len(rates)) * _micro_batches(scalars), len(rates) - 1)]
            return result

        return _on("learning_rate_schedule", hurried)

    return varied(correct, change_for)


@mutant("train_steps", "P37", "S24")
def train_without_clipping(correct: Composition) -> Composition:
    """Clipping left out."""
    return varied(correct, lambda _: _on("clip_by_global_norm", lambda made: made.run(max_norm=math.inf)))


@mutant("train_steps", "own")
def train_max_norm_hard_coded(correct: Composition) -> Composition:
    """Clipped to 1 whatever the config says."""
    return varied(correct, lambda _: _on("clip_by_global_norm", lambda made: made.run(max_norm=1.0)))


@mutant("train_steps", "own")
def train_gradients_not_zeroed(correct: Composition) -> Composition:
    """The clipped gradient of the step before is still there."""

    def kept(made: Made) -> str:
        result = made.run()
        if _is_gradient(made) and _step(made):
            before = made.tape.values[f"steps.{_step(made) - 1}.clip.gradient"]
            made.tape.values[result] = made.tape.values[result] + before
        return result

    return varied(correct, lambda _: kept)


@mutant("train_steps", "S14")
def train_lora_b_premultiplied(correct: Composition) -> Composition:
    """B stored times alpha/rank and optimised so."""

    def build(tape: Tape, scalars: Scalars) -> None:
        scale = scalars["alpha"] / scalars["rank"]
        factors = [name for name in trainable_names(scalars) if ".lora_B." in name]
        tape.values |= {name: tape.values[name] * scale for name in factors}
        correct.build(tape, {**scalars, "alpha": float(scalars["rank"])})
        for name in factors:
            tape.values[f"trainable/{name}"] = tape.values[f"trainable/{name}"] / scale

    return Composition(build, correct.differentiable)


@mutant("train_steps", "S15")
def train_moves_base_weights(correct: Composition) -> Composition:
    """Norm weights trained as well."""

    def change_for(scalars: Scalars) -> Change:
        norms = {name: shape for name, shape in parameter_shapes(scalars).items() if name.endswith("norm.weight")}
        moments: dict[str, Array] = {}

        def moved(made: Made) -> str:
            """Moves the norm weights in place by a step of AdamW of their own, on the gradient at which LoRA's was taken."""
            tape, batch = made.tape, scalars["batch"]
            trained = dict(
                zip(_shapes(scalars), split(tape.values[made.arguments["parameter"]], list(_shapes(scalars).values())), strict=True)
            )
            samples = slice(_step(made) * batch, (_step(made) + 1) * batch)
            gradient = _gradient(tape, scalars, {**_model_inputs(tape, scalars), **trained}, list(norms), samples)
            state = {"exp_avg": np.zeros_like(gradient), "exp_avg_sq": np.zeros_like(gradient), **moments}
            state["parameter"] = flatten([tape.values[name] for name in norms])
            update = {name: made.arguments[name] for name in ("step", "learning_rate", "weight_decay")}
            moments.update(tape.operation("adamw_step").run({**state, "gradient": gradient, **update}))
            for name, value in zip(norms, split(moments["parameter"], list(norms.values())), strict=True):
                tape.values[name][...] = value
            return made.run()

        return _on("adamw_step", moved)

    def build(tape: Tape, scalars: Scalars) -> None:
        tape.values |= {name: value.copy() for name, value in tape.values.items() if name.endswith("norm.weight")}
        varied(correct, change_for).build(tape, scalars)

    return Composition(build, correct.differentiable)


@mutant("train_steps", "own")
def train_tiny_moments_blow_up(correct: Composition) -> Composition:
    """Parameters whose moment is tiny beside the others move ten rates."""

    def thrown(made: Made) -> str:
        result = made.run()
        size = np.abs(made.tape.values[made.arguments["gradient"]])
        tiny = (size > 0) & (size < 0.01 * size.max(initial=0.0))
        made.tape.values[result] = made.tape.values[result] + np.where(tiny, 10 * made.arguments["learning_rate"], 0.0)
        return result

    return varied(correct, lambda _: _on("adamw_step", thrown))


@mutant("train_steps", "own")
def train_decay_on_head_only(correct: Composition) -> Composition:
    """Weight decay not applied to LoRA."""

    def change_for(scalars: Scalars) -> Change:
        def undecayed(made: Made) -> str:
            before = made.tape.values[made.arguments["parameter"]]
            result = made.run()
            decay = before * (made.arguments["learning_rate"] * made.arguments["weight_decay"])
            lora = _marks(scalars, lambda name: ".lora_" in name)
            made.tape.values[result] = made.tape.values[result] + np.where(lora, decay, 0.0)
            return result

        return _on("adamw_step", undecayed)

    return varied(correct, change_for)


@mutant("train_steps", "own")
def train_reports_clipped_norm(correct: Composition) -> Composition:
    """Gradient norm recorded after clipping."""

    def change_for(scalars: Scalars) -> Change:
        def after(made: Made) -> str:
            result = made.run()
            norm = f"{made.path}.norm"
            made.tape.values[norm] = np.minimum(made.tape.values[norm], made.tape.values[norm].dtype.type(scalars.get("max_norm", 1.0)))
            return result

        return _on("clip_by_global_norm", after)

    return varied(correct, change_for)


@mutant("train_steps", "P35")
def train_step_count_stuck(correct: Composition) -> Composition:
    """Every step is corrected as the first."""
    return varied(correct, lambda _: _on("adamw_step", lambda made: made.run(step=1)))


@mutant("train_steps", "own")
def train_moments_reset(correct: Composition) -> Composition:
    """Every step starts from zero moments."""
    return varied(correct, lambda _: _on("adamw_step", lambda made: made.run(exp_avg="initial.exp_avg", exp_avg_sq="initial.exp_avg_sq")))


@mutant("train_steps", "own")
def train_class_weights_dropped(correct: Composition) -> Composition:
    """Class weights not passed on."""

    def build(tape: Tape, scalars: Scalars) -> None:
        tape.values.pop("class_weights", None)
        correct.build(tape, scalars)

    return Composition(build, correct.differentiable)


@mutant("train_steps", "P31", "S12")
def train_reports_mean_of_micro_batch_losses(correct: Composition) -> Composition:
    """Loss of unequal micro-batches averaged without their sizes."""

    def unweighted(made: Made) -> str:
        result = made.run()
        if made.operation == "average_gradients" and not _is_gradient(made):
            made.tape.values[result] = made.tape.values[made.arguments["gradients"]].mean(axis=0)
        return result

    return varied(correct, lambda _: unweighted)


@mutant("train_steps", "P41")
def train_schedule_one_step_ahead(correct: Composition) -> Composition:
    """Step t takes the rate of step t + 1."""

    def ahead(made: Made) -> str:
        result = made.run()
        rates = made.tape.values[result]
        made.tape.values[result] = np.append(rates[1:], rates[-1])
        return result

    return varied(correct, lambda _: _on("learning_rate_schedule", ahead))


@mutant("train_steps", "P36")
def train_masters_low_precision(correct: Composition) -> Composition:
    """Trainable parameters kept in bfloat16."""

    def rounded(made: Made) -> str:
        result = made.run()
        made.tape.values[result] = in_bfloat16(made.tape.values[result])
        return result

    return varied(correct, lambda _: _on("adamw_step", rounded))
