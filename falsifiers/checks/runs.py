"""Whole training runs: their steps, epochs, validation, checkpoints, early stop and continuation, held to what their own records say and
to the reference at the subject's own parameters, so that no error of an earlier step hides or feigns one of a later.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import reference
from falsifiers.attack import Attack
from falsifiers.case import Case
from falsifiers.checks.refusals import refusal
from falsifiers.comparison import Comparison, broken, compare, compare_exactly, value_at_least
from falsifiers.fill import Generator, generator_for
from falsifiers.precision import UNIT_ROUNDOFF
from falsifiers.strategies import Draw, build
from reference.classifier import trainable_names
from reference.optimiser import clip_by_global_norm, learning_rate_schedule
from reference.table import Array, Arrays
from reference.training import flatten, split

MICRO, ACCUMULATION, BETA1 = 2, 2, 0.9
BATCH = MICRO * ACCUMULATION


class _Problem:
    """A small run: a case of `train_steps` for its parameters, samples as bytes, and settings."""

    def __init__(self, attack: Attack, case: Case, samples: tuple[int, int] = (9, 7), several: bool = False, **settings: Any) -> None:
        rng = generator_for(case.seed, "run")
        self.classes, self.several = 3, several
        self.scalars = {
            "family": str(rng.choice(["llama", "qwen2", "qwen3"])),
            "eps": 1e-6,
            "theta": 10000.0,
            "tied": True,
            "alpha": 4.0,
            "targets": str(rng.choice(["q_v", "all"])),
            "pooling": str(rng.choice(["mean", "last"])),
            "nf4": bool(settings.get("quantize_nf4", False)),
            "learning_rate": 1e-2,
        }
        sizes = {"batch": 1, "seq": 2, "vocab": 257, "hidden": 16, "intermediate": 24, "layers": 1, "kv_heads": 1, "groups": 2}
        sizes |= {"half_dim": 4, "steps": 1, "micro": 1, "classes": self.classes, "rank": 2}
        drawn = build(replace(attack.claim, operation="train_steps"), Draw(sizes, self.scalars, {}, case.seed), "normal", "float32")
        self.scalars = dict(drawn.scalars)
        self.parameters = {name: value for name, value in drawn.inputs.items() if name.startswith("parameters/")}
        self.names = trainable_names(self.scalars)
        self.settings = {
            "num_classes": self.classes,
            "lora_rank": 2,
            "lora_alpha": 4.0,
            "lora_targets": self.scalars["targets"],
            "pooling": self.scalars["pooling"],
            "batch_size": MICRO,
            "accumulation_steps": ACCUMULATION,
            "epochs": 2,
            "max_seq_len": 16,
            "learning_rate": 1e-2,
            "gradient_clip_norm": 0.5,
            "multi_label": several,
            "seed": int(rng.integers(1000)),
            **settings,
        }
        self.train, self.validation = (self._corpus(rng, count) for count in samples)

    def _corpus(self, rng: Generator, count: int) -> tuple[list[list[int]], list[Any]]:
        """Rows of bytes, every class among the labels; no two samples alike."""
        rows = [[index, *rng.integers(0, 256, int(rng.integers(1, 7))).tolist()] for index in range(count)]
        if self.several:
            return rows, (rng.random((count, self.classes)) < 0.5).astype(int).tolist()
        return rows, [int(label) for label in [*range(self.classes), *rng.integers(0, self.classes, count)][:count]]

    def request(self, **more: Any) -> dict[str, Any]:
        """What the subject is asked for."""
        corpora = {"train_rows": self.train[0], "train_targets": self.train[1]}
        corpora |= {"validation_rows": self.validation[0], "validation_targets": self.validation[1]}
        return {"inputs": self.parameters, "scalars": self.scalars, "settings": self.settings, **corpora, **more}

    @property
    def batches(self) -> list[int]:
        """Samples of each step of an epoch."""
        count = len(self.train[0])
        return [min(BATCH, count - start) for start in range(0, count, BATCH)]

    def inputs(self, trainable: Arrays, rows: Sequence[Sequence[int]], labels: Sequence[Any]) -> dict[str, Array]:
        """The inputs of `classifier_loss` at those trainable tensors."""
        longest = max(map(len, rows))
        ids = np.array([[*row, *[0] * (longest - len(row))] for row in rows])
        mask = np.array([[index < len(row) for index in range(longest)] for row in rows])
        given = {"input_ids": ids, "mask": mask, "labels": np.array(labels, np.float64 if self.several else np.int64)}
        weights = self._class_weights()
        return {**self.parameters, **trainable, **given, **({} if weights is None else {"class_weights": weights})}

    def _class_weights(self) -> Array | None:
        """Of "balanced" settings: inversely proportional to the number of samples, adding up to the number of classes."""
        if self.settings.get("class_weights") != "balanced":
            return None
        inverse = 1.0 / np.bincount(self.train[1], minlength=self.classes)
        return np.asarray(self.classes * inverse / inverse.sum())

    def loss(self, trainable: Arrays, rows: Sequence[Sequence[int]], labels: Sequence[Any]) -> float:
        """The reference's mean loss."""
        return float(reference.evaluate("classifier_loss", self.inputs(trainable, rows, labels), self.scalars)["loss"])

    def gradient(self, trainable: Arrays, rows: Sequence[Sequence[int]], labels: Sequence[Any]) -> Array:
        """The reference's mean gradient, one vector [count]."""
        inputs = self.inputs(trainable, rows, labels)
        found = reference.differentiate("classifier_loss", inputs, self.scalars, {"loss": np.ones(())}, ["trainable"])
        return flatten([found[f"parameters/{name}"] for name in self.names])


def _group(answer: Arrays, prefix: str) -> dict[str, Array]:
    return {f"parameters/{name.removeprefix(prefix)}": value for name, value in answer.items() if name.startswith(prefix)}


def _near(attack: Attack, name: str, expected: Array | float, actual: Array | float) -> Comparison:
    """Within the claim's literal tolerance, relative to the largest magnitude."""
    wanted, got = np.asarray(expected, np.float64), np.asarray(actual)
    return compare(name, wanted, got, attack.literal(wanted), UNIT_ROUNDOFF["float32"])


def _equal(expected: Mapping[str, Array], actual: Mapping[str, Array], what: str) -> list[Comparison]:
    """The same names with the same bits."""
    if set(expected) != set(actual):
        return [broken(what, "other names", str(sorted(expected)[:4]), str(sorted(actual)[:4]))]
    if not expected:
        return [broken(what, "nothing to compare")]
    return [compare_exactly(f"{what} {name}", np.asarray(value), np.asarray(actual[name])) for name, value in expected.items()]


def _same(name: str, expected: Sequence[str], actual: Sequence[str]) -> Comparison:
    """Texts that have to be the same."""
    if list(expected) == list(actual):
        return Comparison(name, True, 0.0, "exact")
    odd = sorted(set(expected) ^ set(actual))
    return broken(name, "not the same", f"{len(expected)} texts", f"{len(actual)}, only one side has {odd[0] if odd else 'some twice'}")


def run_steps_follow_the_reference(attack: Attack, case: Case) -> list[Comparison]:
    """Loss, pre-clip norm and first moment of each step against the reference on the samples that it read, at the parameters before it."""
    several = case.seed % 2 == 1
    weights = {} if several else {"class_weights": "balanced"}
    problem = _Problem(attack, case, several=several, **weights)
    answer = attack.answer(case, scalars=problem.request(states=True, record=True))
    found, before = [], {name: problem.parameters[f"parameters/{name}"] for name in problem.names}
    moment = np.zeros(sum(value.size for value in before.values()))
    for step in range(1, len(answer["steps/step"]) + 1):
        rows, labels = zip(*map(json.loads, answer[f"fed/{step}"]), strict=True)
        trainable = {f"parameters/{name}": np.asarray(value, np.float64) for name, value in before.items()}
        clipped, norm = clip_by_global_norm(problem.gradient(trainable, rows, labels)[None], problem.settings["gradient_clip_norm"])
        moment = BETA1 * moment + (1.0 - BETA1) * clipped[0]
        state = {name.removeprefix(f"state/{step}/"): v for name, v in answer.items() if name.startswith(f"state/{step}/")}
        given = flatten([np.asarray(state[f"exp_avg/{name}"], np.float64) for name in problem.names])
        found += [
            _near(attack, f"loss of step {step}", problem.loss(trainable, rows, labels), answer["steps/loss"][step - 1]),
            _near(attack, f"norm of step {step}", norm, answer["steps/gradient_norm"][step - 1]),
            _near(attack, f"first moment after step {step}", moment, given.astype(np.float32)),
        ]
        before, moment = {name: state[f"trainable/{name}"] for name in problem.names}, given
    return found


def every_sample_once_an_epoch(attack: Attack, case: Case) -> list[Comparison]:
    """The samples that the steps of an epoch read are those of the corpus, each once; their order changes from epoch to epoch."""
    problem = _Problem(attack, case, epochs=3)
    answer = attack.answer(case, scalars=problem.request(record=True))
    every = sorted(json.dumps([row, label]) for row, label in zip(*problem.train, strict=True))
    orders, found = [], []
    for epoch in range(3):
        steps = [step for step, number in zip(answer["steps/step"], answer["steps/epoch"], strict=True) if number == epoch + 1]
        orders.append([text for step in steps for text in answer[f"fed/{int(step)}"].tolist()])
        found.append(_same(f"samples of epoch {epoch + 1}", every, sorted(orders[-1])))
        lengths = [len(answer[f"fed/{int(step)}"]) for step in steps]
        found.append(compare_exactly(f"samples a step of epoch {epoch + 1}", np.array(problem.batches), np.array(lengths)))
    if orders[0] == orders[1] or orders[1] == orders[2]:
        found.append(broken("order", "the same in two epochs"))
    return found


def rates_are_the_schedules(attack: Attack, case: Case) -> list[Comparison]:
    """The recorded rate of every optimiser step against the reference's schedule over epochs · ⌈samples / effective batch⌉ steps."""
    rng = generator_for(case.seed, "schedule")
    kind, warmup = str(rng.choice(["linear", "cosine"])), float(rng.choice([0.06, 0.3]))
    problem = _Problem(attack, case, epochs=3, schedule=kind, warmup_fraction=warmup)
    answer = attack.answer(case, scalars=problem.request())
    expected = learning_rate_schedule(3 * len(problem.batches), problem.settings["learning_rate"], warmup, kind)
    return [_near(attack, "learning rates", expected, answer["steps/learning_rate"])]


def validation_loss_is_the_mean_over_samples(attack: Attack, case: Case) -> list[Comparison]:
    """After each epoch the validation loss against the reference's mean over all samples, their number no multiple of the batch, at the
    parameters then; and the training loss against the mean over samples of the steps' losses.
    """
    problem = _Problem(attack, case, samples=(9, 7), several=case.seed % 2 == 1)
    answer = attack.answer(case, scalars=problem.request())
    found = []
    for number, loss in enumerate(answer["epochs/validation_loss"], start=1):
        trainable = {name: np.asarray(value, np.float64) for name, value in _group(answer, f"epoch/{number}/").items()}
        found.append(_near(attack, f"validation loss of epoch {number}", problem.loss(trainable, *problem.validation), loss))
        own = answer["steps/epoch"] == number
        mean = np.average(answer["steps/loss"][own], weights=answer["steps/samples"][own])
        found.append(_near(attack, f"training loss of epoch {number}", mean, answer["epochs/train_loss"][number - 1]))
    return found


def best_checkpoint_has_the_lowest_loss(attack: Attack, case: Case) -> list[Comparison]:
    """best/ holds the tensors after the first epoch of the lowest validation loss, last/ those after the last epoch."""
    problem = _Problem(attack, case, epochs=4, learning_rate=0.1)
    answer = attack.answer(case, scalars=problem.request())
    losses = answer["epochs/validation_loss"]
    best = int(np.argmin(losses)) + 1
    flags = np.array([loss < min([math.inf, *losses[:index]]) for index, loss in enumerate(losses)])
    return [
        compare_exactly("best epoch", np.asarray(best), np.asarray(int(answer["result/best_epoch"]))),
        compare_exactly("best loss", np.asarray(losses.min()), answer["result/best_loss"]),
        compare_exactly("epochs called the best so far", flags, answer["epochs/best"].astype(bool)),
        *_equal(_group(answer, f"epoch/{best}/"), _group(answer, "best/"), "best/"),
        *_equal(_group(answer, f"epoch/{len(losses)}/"), _group(answer, "last/"), "last/"),
    ]


def stops_after_patience_epochs(attack: Attack, case: Case) -> list[Comparison]:
    """The run ends with the first epoch that is `patience` epochs after the best one, else with the last."""
    patience = 1 + case.seed % 2
    problem = _Problem(attack, case, epochs=7, learning_rate=0.2, early_stop_patience=patience)
    answer = attack.answer(case, scalars=problem.request())
    losses = answer["epochs/validation_loss"]
    bests = [int(np.argmin(losses[: epoch + 1])) for epoch in range(len(losses))]
    due = [epoch for epoch, best in enumerate(bests) if epoch - best == patience]
    expected = due[0] + 1 if due else 7
    return [
        compare_exactly("epochs", np.asarray(expected), np.asarray(len(losses))),
        compare_exactly("stopped early", np.asarray(expected < 7), answer["result/stopped_early"]),
    ]


def killed_run_goes_on(attack: Attack, case: Case) -> list[Comparison]:
    """Processes killed (SIGKILL) at random moments, writes to the folder and steps, and continued, against one that is not.

    Every step that any of them made, and in the end parameters, moments, rates, progress and both adapters, bit for bit.
    """
    rng = generator_for(case.seed, "kills")
    problem = _Problem(attack, case, epochs=4, learning_rate=0.1, early_stop_patience=2 + case.seed % 2)
    every = {"save_every": [None, 1, 2][int(rng.integers(3))]}
    whole = attack.answer(case, scalars=problem.request(kills=[], **every))
    kills = _kills(rng, whole["moments"].tolist(), int(attack.claim.arguments["kills"]))
    killed = attack.answer(case, scalars=problem.request(kills=kills, **every))
    made = dict.fromkeys(killed["log"].tolist())
    found = [_same("steps made", sorted(whole["log"].tolist()), sorted(made))]
    for part in ("final/", "best/", "last/", "result/"):
        found += _equal(_group(whole, part), _group(killed, part), part)
    return found


def _kills(rng: Generator, moments: Sequence[str], count: int) -> list[tuple[str, int]]:
    """Random moments after the run has begun, one of the names of the state's file and one of the others by turns; early ones more often,
    since a continued process has fewer.
    """
    names = sorted({name for name in moments if "run.json" not in name and not name.startswith("os.mkdir")})
    chosen = []
    for turn in range(count):
        among = [name for name in names if ("state" in name) == (turn % 2 == 0)]
        name = str(rng.choice(among))
        chosen.append((name, int(rng.integers(1, max(1, moments.count(name) // (turn + 1)) + 1))))
    return chosen


def refuses_to_continue_another_run(attack: Attack, case: Case) -> list[Comparison]:
    """Other settings, other samples, a damaged state: each is refused by its name, and the folder is as it was."""
    problem = _Problem(attack, case)
    rng = generator_for(case.seed, "changes")
    rows, at = [list(row) for row in problem.train[0]], int(rng.integers(len(problem.train[0])))
    rows[at][-1] ^= 1
    labels = [(label + (index == at)) % problem.classes for index, label in enumerate(problem.validation[1][: at + 1])]
    setting = str(rng.choice(["learning_rate", "epochs", "weight_decay", "batch_size"]))
    value = {"learning_rate": 2e-2, "epochs": 3, "weight_decay": 0.1, "batch_size": 1}[setting]
    other = [*labels, *problem.validation[1][at + 1 :]]
    changes: dict[str, tuple[dict[str, Any], str]] = {
        f"another {setting}": ({"changes": {"settings": {**problem.settings, setting: value}}}, f"settings\\.{setting}"),
        "another training sample": ({"changes": {"train_rows": rows}}, "training"),
        "another validation label": ({"changes": {"validation_targets": other[: len(problem.validation[1])]}}, "validation"),
        "a damaged state": ({"changes": {}, "damage": float(rng.random())}, "state.*damaged"),
    }
    found = []
    for name, (change, message) in changes.items():
        if name == "another validation label" and other[: len(problem.validation[1])] == problem.validation[1]:
            continue
        request = problem.request(stop=2, save_every=1, **change)
        refused = refusal(lambda request=request: attack.answer(case, scalars=request), "ValueError", message)  # type: ignore[misc]  # the default binds the request
        found.append(replace(refused, tensor=name))
    return found


def run_keeps_the_base_weights(attack: Attack, case: Case) -> list[Comparison]:
    """Whatever the model holds besides the trainable tensors, NF4 codes among it, before and after a whole run, bit for bit."""
    problem = _Problem(attack, case, quantize_nf4=case.seed % 2 == 1)
    answer = attack.answer(case, scalars=problem.request())
    return _equal(_group(answer, "before/"), _group(answer, "after/"), "frozen")


def nf4_run_is_quantised_and_trains(attack: Attack, case: Case) -> list[Comparison]:
    """Each of the seven projections computes with the reference's NF4 of its weight; and every trainable tensor moves."""
    problem = _Problem(attack, case, quantize_nf4=True, epochs=1)
    answer = attack.answer(case, scalars=problem.request())
    used, found = _group(answer, "before/used/"), []
    for name, weight in problem.parameters.items():
        if name.endswith("_proj.weight"):
            if name.replace("parameters/", "before/used/") not in answer:
                found.append(broken(name, "not quantised, though NF4 was asked for"))
                continue
            found.append(_near(attack, name, _through_nf4(weight), used[name]))
    for name in problem.names:
        moved = np.asarray(answer[f"epoch/1/{name}"], np.float64) != problem.parameters[f"parameters/{name}"]
        found.append(value_at_least(f"share of {name} that moved", float(moved.mean()), 0.5))
    return found


def _through_nf4(weight: Array) -> Array:
    rows, columns = weight.shape
    stored = reference.evaluate("nf4_quantize", {"weight": weight}, {"block_size": 64})
    shape = {"rows": rows, "columns": columns, "block_size": 64}
    return reference.evaluate("nf4_dequantize", {**stored}, shape)["weight"]


def gradient_vector_goes_out_and_in(attack: Attack, case: Case) -> list[Comparison]:
    """The vector is the reference's gradient in the order of layers, A before B, then the head.

    Given back it makes the step of `train_batch`, bit for bit; of another length it is refused, and nothing changes.
    """
    problem = _Problem(attack, case)
    indices = list(range(5))
    asked = attack.answer(case, scalars=problem.request(calls=[("train_batch", indices)]))
    out = attack.answer(case, scalars=problem.request(calls=[("accumulate", indices), ("gradient_vector", None)]))
    vector = out["1/vector"]
    calls = [("accumulate", indices), *(("apply_gradient_vector", v) for v in (vector[:-1], np.append(vector, 0), vector[:0], vector))]
    back = attack.answer(case, scalars=problem.request(calls=calls))
    rows, labels = ([each[i] for i in indices] for each in problem.train)
    expected = problem.gradient(problem.parameters, rows, labels)
    found = [_near(attack, "gradient vector", expected, vector)]
    found += [
        _near(attack, name, part, got)
        for name, part, got in zip(problem.names, *(split(each, _shapes(problem)) for each in (expected, vector)), strict=True)
    ]
    for index in (1, 2, 3):
        error = str(back.get(f"{index}/error", "accepted"))
        if not error.startswith("ValueError"):
            found.append(broken(f"vector of {len(calls[index][1])} of {len(vector)} elements", "not refused", "ValueError", error))
        found += _equal(_group(out, "1/state/"), _group(back, f"{index}/state/"), "after the refusal")
    return found + _equal(_group(asked, "0/state/"), _group(back, "4/state/"), "after the step")


def _shapes(problem: _Problem) -> list[tuple[int, ...]]:
    return [problem.parameters[f"parameters/{name}"].shape for name in problem.names]


def trainable_count_is_the_formulas(attack: Attack, case: Case) -> list[Comparison]:
    """Σ r · (in + out) + hidden · classes + classes: the length of the gradient vector, and the number that the summary states."""
    problem = _Problem(attack, case)
    answer = attack.answer(case, scalars=problem.request(calls=[("accumulate", [0]), ("gradient_vector", None)]))
    scalars = problem.scalars
    targets = ("q_proj", "v_proj") if scalars["targets"] == "q_v" else ("_proj",)
    shapes = [value.shape for name, value in problem.parameters.items() if name.removesuffix(".weight").endswith(targets)]
    expected = sum(2 * sum(shape) for shape in shapes if len(shape) == 2) + scalars["hidden"] * problem.classes + problem.classes
    found = [compare_exactly("length of the gradient vector", np.asarray(expected), np.asarray(len(answer["1/vector"])))]
    if f"{expected:,} trainable" not in str(answer["summary"]):
        found.append(broken("summary", "another number of trainable parameters", f"{expected:,} trainable", str(answer["summary"])))
    return found


def evaluation_changes_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """Training with evaluations between its calls, those that accumulate and apply too, against training without: the same bits.

    And an evaluation after a step gives the reference's loss at the parameters then, not what the step left behind.
    """
    problem = _Problem(attack, case)
    train = [("train_batch", [0, 1, 2]), ("accumulate", [3, 4, 8]), ("apply", None), ("train_batch", [5, 6])]
    others: list[tuple[str, Any]] = [("evaluate", [4, 5, 7]), ("forward_only", [8, 2]), ("probabilities", [1]), ("evaluate", [0, 1, 2])]
    between = [call for step in train for call in (*others, step)] + others
    plain = attack.answer(case, scalars=problem.request(calls=train))
    mixed = attack.answer(case, scalars=problem.request(calls=between))
    found = []
    for step in range(len(train)):
        at = step * (len(others) + 1) + len(others)
        found += _equal(_group(plain, f"{step}/state/"), _group(mixed, f"{at}/state/"), f"after call {step + 1}")
        rows, labels = ([each[i] for i in (4, 5, 7)] for each in problem.train)
        trainable = {name: np.asarray(v, np.float64) for name, v in _group(mixed, f"{at}/state/trainable/").items()}
        found.append(_near(attack, f"loss after call {step + 1}", problem.loss(trainable, rows, labels), mixed[f"{at + 1}/loss"]))
    return found


def empty_batch_has_accuracy_zero(attack: Attack, case: Case) -> list[Comparison]:
    """`forward_only` of no sample: total 0, correct 0, accuracy 0, no loss made up; a step on none is refused."""
    problem = _Problem(attack, case)
    answer = attack.answer(case, scalars=problem.request(calls=[("forward_only", []), ("train_batch", [])]))
    numbers = {name: np.asarray(answer[f"0/{name}"], np.float64) for name in ("total", "correct", "accuracy")}
    found = [compare_exactly(name, np.asarray(0.0), value) for name, value in numbers.items()]
    found.append(compare_exactly("loss", np.asarray(np.nan), np.asarray(answer["0/loss"], np.float64)))
    if not str(answer.get("1/error", "")).startswith("ValueError"):
        found.append(broken("train_batch of no sample", "accepted"))
    return found


def non_finite_value_stops_the_run(attack: Attack, case: Case) -> list[Comparison]:
    """A NaN planted in the head's bias after a step: no step is made any more, and the run says when and which tensor.

    The folder holds the state from before.
    """
    problem = _Problem(attack, case)
    spoil = 1 + case.seed % 3
    answer = attack.answer(case, scalars=problem.request(spoil=spoil))
    found = [compare_exactly("steps made", np.asarray(spoil), np.asarray(len(answer["steps/step"])))]
    when = f"step {spoil + 1}:" if spoil < len(problem.batches) else "validation after epoch 1:"
    for word in (when, "score.bias"):
        if word not in str(answer["stopped"]):
            found.append(broken("the end", "does not say where", word, str(answer["stopped"]) or "ended as usual"))
    kept = {f"parameters/{name}": problem.parameters[f"parameters/{name}"].astype(np.float32) for name in problem.names}
    return found + _equal(kept, _group(answer, "final/trainable/"), "state in the folder")
