"""The entry points of a pipeline: gradient vector, numbers of parameters, evaluation, the empty batch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_at_most
from blackswan.falsifiers.subjects.doors.training import Pipeline, State
from blackswan.falsifiers.system.broken_calls import broken_calls_change_nothing
from blackswan.falsifiers.system.run_problem import SmallRun, part, small_run
from blackswan.falsifiers.system.runs import BETA1, after_adamw
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, by_each_backend, may_be_non_finite
from blackswan.reference.optimiser import clip_by_global_norm
from blackswan.reference.training import flatten, split

LONG = 520
"""Tokens of a text, more than 512."""


@by_each_backend
def gradient_vector_goes_out_and_in(trial: Trial) -> Iterator[Comparison]:
    """The vector is the reference's gradient in the order of layers, A before B, then the head.

    Given back it makes the step of `train_batch`, bit for bit, in float64 too; of another length or shape, one number too, it is refused,
    and nothing changes. A rate of 0 that is set then holds for all later steps, for there is no schedule: they move nothing.
    """
    problem, places = small_run(trial), range(5)
    asked, pipeline = trial.trainer.pipeline(problem), trial.trainer.pipeline(problem)
    asked.train_batch(places)
    pipeline.accumulate(places)
    vector, before = pipeline.gradient_vector(), pipeline.state()
    expected = problem.gradient(problem.trainable(), problem.training.samples()[:5])
    yield trial.near("gradient vector", expected, vector)
    if expected.shape == vector.shape:
        parts = (split(each, [problem.parameters[name].shape for name in problem.names]) for each in (expected, vector))
        yield from (trial.near(f"gradient vector, {name}", *pair) for name, *pair in zip(problem.names, *parts, strict=True))
    for wrong in (vector[:-1], np.append(vector, vector[:1]), vector[:1], vector[:0], vector[None], vector[:, None]):
        name = f"vector of shape {wrong.shape} instead of {vector.shape}"
        yield trial.refuses(name, partial(pipeline.apply_gradient_vector, wrong), "", "ValueError")
        yield from same(f"state after the {name}", before, pipeline.state())
    pipeline.apply_gradient_vector(vector)
    yield from same("state after the step with the vector", asked.state(), pipeline.state())
    wide = trial.trainer.pipeline(problem)
    wide.accumulate(places)
    wide.apply_gradient_vector(vector.astype(np.float64))
    yield from same("state after the step with the vector in float64", asked.state(), wide.state())
    pipeline.set_rate(0.0)
    for batch in ([3], [4, 5]):
        pipeline.train_batch(batch)
    yield from _reports(trial, problem)
    yield from _of_a_long_text(trial)
    yield from _micro_batches(trial)
    yield from _given_as_texts(trial)
    yield from _has_the_settings(trial)
    yield from _weighted_in_bfloat16(trial)
    if trial.backend is None:  # the hand-written layers have float32 masters
        yield from _in_float64(trial)
    yield from same("tensors after steps at a rate of 0", *(part(each.state(), "trainable") for each in (asked, pipeline)))


def _reports(trial: Trial, problem: SmallRun) -> list[Comparison]:
    """Each call says loss, size and right answers of its own samples, a step's those of all that it is made of, and the norm.

    The first call has more micro-batches than are kept side by side.
    """
    pipeline, found, waiting = trial.trainer.pipeline(problem), list[Comparison](), list[int]()
    first = [("accumulate", [*range(9)]), ("accumulate", [3]), ("apply", [])]
    for call, places in (*first, ("train_batch", [4, 5, 6]), ("accumulate", [7, 8])):
        found += _report(trial, problem, pipeline, call, places or waiting, [places] if places else [])
        waiting = [*waiting, *places] if call == "accumulate" else []
    vector = pipeline.gradient_vector()
    return found + _report(trial, problem, pipeline, "apply_gradient_vector", [7, 8], [vector])


def _of_a_long_text(trial: Trial) -> list[Comparison]:
    """A text of as many tokens as the settings allow, more than they allow where nothing is said, makes the reference's step."""
    problem = small_run(trial, max_seq_len=LONG)
    rows = [trial.rng("long text").integers(0, 256, LONG).tolist(), *problem.training.rows[1:]]
    problem = replace(problem, training=replace(problem.training, rows=rows))
    return _report(trial, problem, trial.trainer.pipeline(problem), "train_batch", [0, 1], [[0, 1]])


def _has_the_settings(trial: Trial) -> list[Comparison]:
    """A step by hand, and one on a gradient of zero after it, is clipped to the settings' norm and moves parameters by AdamW at their rate
    and their decay."""
    problem = small_run(trial, weight_decay=0.5, gradient_clip_norm=0.05)
    pipeline, before = trial.trainer.pipeline(problem), problem.trainable()
    (gradient,), _ = clip_by_global_norm(problem.gradient(before, problem.training.samples()[:3])[None], 0.05)
    pipeline.train_batch(range(3))
    after, first, second = (part(pipeline.state(), group) for group in ("trainable", "exp_avg", "exp_avg_sq"))
    got = flatten([np.asarray(first[name], np.float64) for name in problem.names])
    found = [trial.near("first moment of a step by hand", (1.0 - BETA1) * gradient, got.astype(np.float32))]
    for name, value in before.items():
        found.append(trial.near(f"{name} after a step by hand", after_adamw(value, first[name], second[name], 1, 1e-2, 0.5), after[name]))
    pipeline.accumulate([3])
    pipeline.apply_gradient_vector(np.zeros(len(gradient), np.float32))
    moved, decayed, squares = (part(pipeline.state(), group) for group in ("trainable", "exp_avg", "exp_avg_sq"))
    for name, value in after.items():
        found.append(
            trial.near(f"first moment of {name} after a gradient of zero", BETA1 * np.asarray(first[name], np.float64), decayed[name])
        )
        expected = after_adamw(value, decayed[name], squares[name], 2, 1e-2, 0.5)
        found.append(trial.near(f"{name} after a gradient of zero", expected, moved[name]))
    return found


def _given_as_texts(trial: Trial) -> list[Comparison]:
    """A sample by itself and several of them make the steps of their tokens, where they are given as texts of ASCII."""
    problem, found = small_run(trial, multi_label=trial.seed % 2 == 1), list[Comparison]()
    problem = replace(problem, training=replace(problem.training, rows=[[each % 128 for each in row] for row in problem.training.rows]))
    by_tokens, by_text = (trial.trainer.pipeline(problem) for _ in range(2))
    for places in ([2], [0, 1, 4]):
        found += same(f"reported of the texts {places}", by_tokens.train_batch(places), by_text.train_texts(places))
    return [*found, *same("state after steps on texts", by_tokens.state(), by_text.state())]


def _weighted_in_bfloat16(trial: Trial) -> list[Comparison]:
    """The loss of a sample, of a model in bfloat16 too, is its class's weight times the loss without weights: weights are not rounded."""
    weights, found = [1 / 3, 0.7, 2.3], list[Comparison]()
    plain, weighted = (trial.trainer.pipeline(small_run(trial, dtype="bfloat16", class_weights=each)) for each in (None, weights))
    for place, weight in enumerate(weights):  # the first samples have the classes in their order
        for call in ("evaluate", "accumulate"):
            own, wanted = (getattr(each, call)([place]).loss for each in (weighted, plain))
            found.append(trial.near(f"{call}: loss of class {place} in bfloat16", weight * wanted, own))
    return found


def _in_float64(trial: Trial) -> list[Comparison]:
    """A model in float64 has moments in it from the beginning, makes the step of a batch with its gradient, and does not round the weight
    of a class, a third here."""
    losses, found = list[float](), list[Comparison]()
    for weights in (None, [1 / 3, 0.7, 2.3]):
        loss, *states = trial.trainer.in_float64(small_run(trial, class_weights=weights), [0])  # of the first class
        losses.append(loss)
        found += same("state in float64 after the step with the vector", *states)
    beyond = abs(losses[1] / (losses[0] / 3) - 1)
    return [*found, value_at_most("relative error of a loss in float64 by its class's weight", beyond, 1e-12)]


def _micro_batches(trial: Trial) -> list[Comparison]:
    """No call puts more samples through the model at a time than a micro-batch has, whatever it is given, and none but those of training
    keeps what a backward pass needs."""
    size = int(trial.rng("micro-batches").integers(2, 4))
    pipeline, found = trial.trainer.pipeline(small_run(trial, batch_size=size, backend="torch")), list[Comparison]()
    for call in ("train_batch", "accumulate", "forward_only", "evaluate", "predict"):
        getattr(pipeline, call)(range(7))
        trains = call in ("train_batch", "accumulate")
        found += same(f"{call}: samples at a time", [(each, trains) for each in [size] * (7 // size) + [1]], pipeline.rows())
        if call == "accumulate":
            pipeline.apply()
    return found


def _report(trial: Trial, problem: SmallRun, pipeline: Pipeline, call: str, own: list[int], given: list[Any]) -> list[Comparison]:
    samples, trainable = [problem.training.samples()[place] for place in own], part(pipeline.state(), "trainable")
    right = round(pipeline.evaluate(own).accuracy * len(own))
    passed = getattr(pipeline, call)(*given)
    found = same(f"{call} {own}: size and right answers", [len(own), right], [passed.total, passed.correct])
    found.append(trial.near(f"{call} {own}: loss", problem.loss(trainable, samples), passed.loss))
    if call == "accumulate":
        return found + same(f"{call} {own}: norm", None, passed.gradient_norm)
    norm = float(np.linalg.norm(problem.gradient(trainable, samples)))
    return [*found, trial.near(f"{call} {own}: norm", norm, passed.gradient_norm)]


def trainable_count_is_the_formulas(trial: Trial) -> Iterator[Comparison]:
    """Σ r · (in + out) + hidden · classes + classes is the length of the gradient vector, and the number that the summary states and that
    an adapter holds, also where a program took parameters out of those that it was given."""
    problem = small_run(trial)
    pipeline = trial.trainer.pipeline(problem)
    pipeline.take_parameters_out()
    pipeline.accumulate([0])
    targets = ("q_proj", "v_proj") if problem.settings["lora_targets"] == "q_v" else ("_proj",)
    shapes = [value.shape for name, value in problem.parameters.items() if name.removesuffix(".weight").endswith(targets)]
    expected = sum(problem.settings["lora_rank"] * sum(shape) for shape in shapes if len(shape) == 2)
    expected += problem.architecture["hidden"] * problem.classes + problem.classes
    yield from same("length of the gradient vector", expected, len(pipeline.gradient_vector()))
    yield from same("numbers of an adapter that is saved", expected, sum(value.size for value in pipeline.saved().values()))
    if f"{expected:,} trainable" not in pipeline.summary():
        yield broken("summary", "another number of trainable parameters", f"{expected:,} trainable", pipeline.summary())


@by_each_backend
def evaluation_changes_nothing(trial: Trial) -> Iterator[Comparison]:
    """Evaluations and saves between the calls of training, those that accumulate and apply too, change no bit of it.

    And an evaluation after a step gives the reference's loss at the parameters then, not what the step left behind; in bfloat16 it is the
    loss that is given where nothing was evaluated before, and with torch's operations that of a call that asks for gradients.
    """
    for dtype, side in (("float32", "left"), ("float32", "right"), ("bfloat16", "left")):
        found = _evaluated_between(trial, small_run(trial, dtype=dtype, padding_side=side), exact=dtype == "float32")
        yield from (replace(each, tensor=f"{dtype}, padded on the {side}: {each.tensor}") for each in found)
    narrow = trial.trainer.pipeline(small_run(trial, dtype="bfloat16", backend="torch"))
    for place in range(3):
        losses = narrow.accumulate([place]).loss, narrow.evaluate([place]).loss
        yield from same(f"loss of sample {place} with gradients and without", *losses)


def _evaluated_between(trial: Trial, problem: SmallRun, exact: bool) -> Iterator[Comparison]:
    plain, mixed = trial.trainer.pipeline(problem), trial.trainer.pipeline(problem)
    samples, places, every = problem.training.samples(), [4, 5, 7], range(len(problem.training))
    for name, *given in (("train_batch", [0, 1, 2]), ("accumulate", [3, 4, 8]), ("apply",), ("train_batch", [5, 6]), ("",)):
        if exact:
            now = part(mixed.state(), "trainable")
            loss, of_all = (problem.loss(now, [samples[place] for place in some]) for some in (places, every))
            yield trial.near(f"loss of an evaluation before {name or 'the end'}", loss, mixed.evaluate(places).loss)
            yield trial.near(f"loss of all samples before {name or 'the end'}", of_all, mixed.forward_only(every).loss)
        mixed.forward_only([8, 2])
        mixed.predict([1])
        mixed.evaluate([0, 1, 2])
        mixed.saved()
        if name:
            for pipeline in (plain, mixed):
                getattr(pipeline, name)(*given)
        yield from same(f"state after {name or 'the end'} {given}", plain.state(), mixed.state())
    yield from same("a first evaluation and a later one", plain.evaluate(places), mixed.evaluate(places))
    held = mixed.answers_held([*every] * 3)
    yield value_at_most("micro-batches whose answers are there at one time in an evaluation", held, 2)
    yield from same("answers that turn gradients on in a program that has turned them off", [], mixed.records_after(places))


@by_each_backend
def failed_calls_change_nothing(trial: Trial) -> Iterator[Comparison]:
    """Calls that fail in their last micro-batch, by a label that no class has, leave the state and what was accumulated as they were.

    So do those that break off in any operation, by a lack of memory or by Ctrl-C; gradients that somebody else left are part of no step.
    """
    problem = small_run(trial, samples=(10, 7))
    labels = [*problem.training.labels[:-1], problem.classes]
    problem, bad = replace(problem, training=replace(problem.training, labels=labels)), len(labels) - 1
    plain, mixed = trial.trainer.pipeline(problem), trial.trainer.pipeline(problem)
    for name, *given in (("train_batch", [0, 1, 2]), ("accumulate", [3, 4, 8]), ("apply",), ("train_batch", [5, 6]), ("",)):
        for failing in ("accumulate", *(["train_batch"] if name != "apply" else [])):
            called = f"{failing} before {name or 'the end'}"
            yield trial.refuses(called, partial(getattr(mixed, failing), [0, 1, 2, 7, bad]), r"\b(label|class)", "ValueError")
        if name:
            for pipeline in (plain, mixed):
                getattr(pipeline, name)(*given)
        yield from same(f"state after {name or 'the end'} {given}", plain.state(), mixed.state())
    if trial.backend is None:  # operations break off by their names, which the hand-written layers do not call
        yield from broken_calls_change_nothing(trial, small_run(trial, backend="torch"))


@by_each_backend
def calls_out_of_order_are_refused(trial: Trial) -> Iterator[Comparison]:
    """A pipeline refuses a gradient or a step of nothing accumulated, and another batch while samples wait.

    A gradient that is not finite makes no step either, nor do several samples where one is meant, or class weights that nobody has counted;
    and a rate that is none is refused. Nothing changes, and the calls that are in order do what they would have done, at a rate of 0 too.
    """
    problem, rng = small_run(trial), trial.rng("calls")
    plain, mixed = trial.trainer.pipeline(problem), trial.trainer.pipeline(problem)
    size = sum(problem.parameters[name].size for name in problem.names)
    uncounted = trial.trainer.pipeline(replace(problem, settings={**problem.settings, "class_weights": "balanced"}))
    yield trial.refuses("a run that is not there, continued", uncounted.resume_nothing, "no run to continue", "FileNotFoundError")
    for call in ("train_batch", "train_step", "accumulate"):
        yield trial.refuses(f"{call}, balanced", partial(getattr(uncounted, call), [0]), "class_weights", "ValueError")
    for name, *given in (("train_batch", [0, 1, 2]), ("accumulate", [3, 4, 8]), ("apply",), ("set_rate", 0.0), ("train_step", [5]), ("",)):
        calls: dict[str, tuple[list[Any], str, str]] = {
            "accumulate": ([[]], "empty", "ValueError"),
            "apply_gradient_vector": ([np.full(size, np.nan)], "nan|norm|finite", "FloatingPointError"),
            "train_step": ([[[0, 1], []][int(rng.integers(2))]], "samples|empty", "ValueError"),
            "set_rate": ([float(rng.choice([np.nan, np.inf, -np.inf, -5e-324]))], "learning_rate", "ValueError"),
        }
        if name == "apply":
            calls["train_batch"] = ([[5, 6]], "3 accumulated", "RuntimeError")
        else:
            calls |= {call: ([], "no sample is accumulated", "ValueError") for call in ("apply", "gradient_vector")}
            calls["train_batch"] = ([[]], "empty", "ValueError")
        for call, (arguments, message, error) in calls.items():
            yield trial.refuses(f"{call} before {name or 'the end'}", partial(getattr(mixed, call), *arguments), message, error)
        if name:
            for pipeline in (plain, mixed):
                getattr(pipeline, name)(*given)
        yield from same(f"state after {name or 'the end'} {given}", plain.state(), mixed.state())


@by_each_backend
def state_is_all_that_steps_depend_on(trial: Trial) -> Iterator[Comparison]:
    """One trainer's state, loaded into another one that has made other steps at another rate and has samples waiting, makes its next steps,
    bit for bit: with a schedule and without, where rates were set by hand, with clipping and without.

    Samples that wait are no part of a state, and the load forgets them; a state that is refused changes nothing, and they still wait.
    """
    rng = trial.rng("state")
    clip = [None, 0.5][trial.seed % 2]
    problem = small_run(trial, gradient_clip_norm=clip, schedule="cosine", warmup_fraction=0.2, quantize_nf4=trial.seed % 2 == 1)
    for name, steps in (("no schedule", None), ("a schedule", 7)):
        giver, taker, other = (_begun(trial, problem, count) for count in (steps, steps, 5 if steps is None else None))
        rates = [float(rate) for rate in rng.uniform(1e-3, 1e-1, 3)]
        giver.train_batch([0, 1, 2])
        giver.set_rate(rates[0])
        giver.train_batch([3, 4])
        giver.set_rate(rates[1])
        taker.set_rate(rates[2])
        taker.train_batch([5])
        for waiting in (giver, taker):
            waiting.accumulate([6, 8])
        state, waits = giver.state(), {"gradient": taker.gradient_vector(), **taker.state()}
        for wrong, (given, word) in {"of another schedule": (other.state(), "learning_rates"), **_damaged(state)}.items():
            yield trial.refuses(f"state {wrong}, {name}", partial(taker.load, given), word, "ValueError")
        yield from same(f"what waits after refusals, {name}", waits, {"gradient": taker.gradient_vector(), **taker.state()})
        taker.load(state)
        yield trial.refuses(f"apply after the load, {name}", taker.apply, "no sample is accumulated", "ValueError")
        yield from same(f"state and rate after the load, {name}", (state, rates[1]), (taker.state(), taker.rate()))
        taker.accumulate([6, 8])
        yield from same(f"step on what waits after the load, {name}", giver.apply(), taker.apply())
        for places in ([7], [0, 3, 5]):
            yield from same(f"step on {places} after the load, {name}", giver.train_batch(places), taker.train_batch(places))
        yield from same(f"state at the end, {name}", giver.state(), taker.state())
        late, fresh = _begun(trial, problem, steps), _begun(trial, problem, steps)
        late.load(giver.state())
        yield from same(f"step of one that has made none before the load, {name}", giver.train_batch([4]), late.train_batch([4]))
        yield from same(f"state after that step, {name}", giver.state(), late.state())
        taker.load(fresh.state())
        yield from same(f"first step after the load of a beginning, {name}", fresh.train_batch([1, 2]), taker.train_batch([1, 2]))
        yield from same(f"state after it, {name}", fresh.state(), taker.state())
    pipeline = trial.trainer.pipeline(problem)
    for start in ("first", "second"):  # after as many steps, by which a copy of the first would be taken for one of the second
        pipeline.schedule(4)
        begun = pipeline.state()
        moments = [part(begun, group) for group in ("exp_avg", "exp_avg_sq")]
        yield from same(
            f"moments at a {start} start", [{name: np.zeros_like(value) for name, value in each.items()} for each in moments], moments
        )
        for places in ([0, 1, 2], [3, 5]):  # the first one warms up, and moves nothing
            pipeline.train_batch(places)
        yield from same(f"adapter that is saved after a {start} start", part(pipeline.state(), "trainable"), pipeline.saved())
    pipeline.accumulate([6, 8])
    pipeline.schedule(4)
    yield trial.refuses("apply after a start while samples waited", pipeline.apply, "no sample is accumulated", "ValueError")


def _begun(trial: Trial, problem: SmallRun, steps: int | None) -> Pipeline:
    pipeline = trial.trainer.pipeline(problem)
    if steps is not None:
        pipeline.schedule(steps)
    return pipeline


def _damaged(state: State) -> dict[str, tuple[State, str]]:
    """States without a moment, with one more or one in another dtype, and with steps that are no number of steps; a word of the refusal."""
    last = max(name for name in state if name.startswith("exp_avg_sq/"))
    steps = {"−1": -1, "1.5": 1.5, "1 and 2": [1, 2]}
    return {
        "without a moment": ({name: value for name, value in state.items() if name != last}, f"{last}' is missing"),
        "with a moment more": ({**state, f"{last}.more": state[last]}, f"{last}.more' is unexpected"),
        "with a moment in float64": ({**state, last: state[last].astype(np.float64)}, f"{last} is torch.float64"),
        **{f"of step {name}": ({**state, "step": np.array(value)}, "step is") for name, value in steps.items()},
    }


@may_be_non_finite("answer.loss", "answer.accuracy")
def empty_batch_has_accuracy_zero(trial: Trial) -> Iterator[Comparison]:
    """`forward_only` of no sample, and a step with a gradient beside none, count nothing and make no loss up; a step on none is refused."""
    problem = small_run(trial)
    pipeline = trial.trainer.pipeline(problem)
    vector = np.zeros(sum(problem.parameters[name].size for name in problem.names), np.float32)
    alone = pipeline.forward_no_row()
    for label, passed in (
        ("evaluated", pipeline.forward_only([])),
        ("a gradient's", pipeline.apply_gradient_vector(vector)),
        ("no row's", alone),
    ):
        yield from (each for name in ("total", "correct", "accuracy") for each in same(f"{label}: {name}", 0, getattr(passed, name)))
        yield from same(f"{label}: loss", np.nan, passed.loss)
    yield from same("classes of no text", 0, len(pipeline.predict([])))
    yield trial.refuses("evaluation of no sample", partial(pipeline.evaluate, []), "no sample", "ValueError")
    yield trial.refuses("train_batch of no sample", partial(pipeline.train_batch, []), "", "ValueError")
