"""Training steps through the hand-written layers beside those by automatic differentiation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, Errors, compare
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.doors.devices import Workload
from blackswan.falsifiers.system.config_files import SCALED
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, may_be_non_finite
from blackswan.falsifiers.system.workloads import FAMILIES, drawn, small
from blackswan.reference.table import Array, Arrays

if TYPE_CHECKING:
    from blackswan.falsifiers.subjects.impl.hand_written import Steps

TARGETS = ("q_v", "all", "k_proj,o_proj,up_proj", "v_proj,gate_proj,down_proj")
POOLINGS = ("mean", "last")
"""Poolings by which rotations show; by the first token they do not, for it attends to itself alone."""
CALLS = (
    *(("train_batch", 3), ("train_batch", 4), ("accumulate", 1), ("accumulate", 4), ("accumulate", 4), ("apply", 0)),
    *(("train_batch", 2), ("train_batch", 3), ("forward_only", 4)),
)
"""Calls of a trainer with so many samples, of which three are computed at a time; the last one evaluates."""
RATE_SET = 6
"""Number of the call before which rate, decay, largest norm and class weights are set by hand and parameters get other memory, when a step
has been captured and, where nothing moves, no state was loaded."""
WEIGHTS_WRITTEN = (1, 4, 7)
"""Numbers of the calls before which class weights are written to, those of the first call and those that were set."""
WEIGHTS_EXCHANGED, WEIGHTS_BACK = 2, 3
"""Numbers of the calls before which others are put in the place of the first class weights, and these are put back."""
MANY = 6
"""Micro-batches of a call, more than the four whose gradients are held side by side."""
LONG = 300
"""Tokens of a text, and classes, more than a byte counts."""
VOCABULARY = 70_000
"""More tokens than 16 bits count."""
LENGTHS = ((4, 4, 4), (6, 5, 1))
"""Of three samples in the first call and in later ones: as many tokens in all, and yet a longer sample than a captured step has met."""
BIAS, HEAD = "trainable/score.bias", "trainable/score.weight"
MOMENTS, ROUNDING = ("exp_avg", "exp_avg_sq"), 1e-7
MOTIONLESS = 1e-12
"""A norm of gradients that is so far below AdamW's ε that parameters move by their decay alone."""
Batch = tuple[Array, Array, Array]


@may_be_non_finite("*score.bias")
def follow_differentiation(trial: Trial) -> Iterator[Comparison]:
    """The check compares what each call says, both moments after each step, and where gradients are next to nothing the parameters: for
    each family, by the mean and the last token in turn, with one label a sample and several, NF4 and not; then single steps, and one with
    Triton's kernels. Bad batches change nothing."""
    for number, family in enumerate(FAMILIES):
        rng = trial.rng(family)
        work, settings = _drawn(rng, trial, number + trial.seed, family)
        yield from (replace(each, tensor=f"{family}: {each.tensor}") for each in _followed(trial, rng, work, settings, CALLS))
    yield from _single_steps(trial)
    if trial.on_gpu:  # where every step has Triton's kernels
        return
    yield from _broken_off(trial)
    work, settings = _drawn(trial.rng("kernels"), trial, trial.seed, FAMILIES[trial.seed % 3])
    work = replace(work, layers=1, nf4=True, micro=1)
    kernels = _followed(trial, trial.rng("batches"), work, settings, [("train_batch", 1)], plain=False)
    yield from (replace(each, tensor=f"kernels: {each.tensor}") for each in kernels)


def _single_steps(trial: Trial) -> Iterator[Comparison]:
    """One of two workers, whose batch is that of both; the first token of each sample; an MLP so narrow that the weights of attention are
    the largest; as many heads for keys as for queries, of which queries and values have updates and keys, between them, none; a head in 16
    bits whose logits, those of its bias, have no rounding, with weights of the classes or labels between 0 and 1, which those bits do not
    hold; and NF4 whose blocks do not meet, or that is quantised doubly, which is refused."""
    rng = trial.rng("single steps")
    work, settings = _drawn(rng, trial, 0, FAMILIES[trial.seed % 3])
    alone = {
        BIAS: rng.permutation(np.array([0.5, -1.25, 2.0], np.float32)),
        "trainable/score.weight": np.zeros((3, work.hidden), np.float32),
    }
    narrow_head, steps_of_16_bits = replace(work, dtype="bfloat16"), 0.5 + rng.integers(0, 100, (2, 3)) / 256
    weights_of_16_bits = rng.permutation([1.0038, 2.0083, 0.502]).tolist()  # which bfloat16 rounds down, up and up
    soft = (steps_of_16_bits + 0.0019).astype(np.float32)  # all would be rounded down
    asked: dict[str, tuple[Workload, dict[str, Any], dict[str, Array]]] = {
        "two workers": (work, {"workers": 2}, {}),
        "the first token": (replace(work, pooling="first"), {}, {}),
        "a narrow MLP": (replace(work, nf4=True, intermediate=8), {}, {}),
        "as many heads for keys": (replace(work, kv_heads=work.heads, targets="q_v"), {}, {}),
        "a head of 16 bits": (narrow_head, {"max_norm": None, "class_weights": weights_of_16_bits}, alone),
        "a head of 16 bits, several labels": (narrow_head, {"max_norm": None, "multi_label": True}, alone),
    }
    for label, (of_one, changed, state) in asked.items():
        weights, (ids, mask, labels) = _adapted(drawn(rng, replace(of_one, targets="all")), of_one.targets), _batch(rng, of_one, 2, False)
        said, labels = list[dict[str, float]](), soft if "multi_label" in changed else labels
        for backend in ("torch", "fused"):
            steps = trial.devices.steps(replace(of_one, backend=backend), weights, settings | changed)
            steps.load({**steps.state(), **state})
            said.append(steps.call("train_batch", ids, mask, labels))
        told = ("loss", "correct", "total") if state else tuple(said[0])
        yield from (trial.near(f"{label}: {key}", said[0][key], said[1][key]) for key in told)
    # a pair of blocks holds 128 weights, as many as gate and up have each: these could be joined
    narrow = {"hidden": 16, "kv_heads": 1, "head_dim": 4, "intermediate": 8}
    refused: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("NF4 blocks", "NF4 blocks", {"hidden": 18}),
        ("NF4 blocks of queries and keys, 192 and 64", "NF4 blocks", {**narrow, "heads": 3}),
        ("NF4 blocks of keys alone", "NF4 blocks", {**narrow, "heads": 2}),
        ("double_quantize", "double_quantize", {"double_quantize": True}),
    )
    for label, message, change in refused:
        of_none = replace(work, nf4=True, backend="fused", **change)
        steps = trial.devices.steps(of_none, _adapted(drawn(rng, replace(of_none, targets="all")), work.targets), settings)
        ask = partial(steps.call, "train_batch", *_batch(rng, of_none, 2, False))
        yield trial.refuses(f"weights that cannot be joined: {label}", ask, f"{message}.*backend torch", "ValueError")
    yield from _of_16_bits(trial, rng, narrow_head, settings)
    yield from _unusual_steps(trial)


def _of_16_bits(trial: Trial, rng: Generator, work: Workload, settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """A whole step of a model in 16 bits is one of the gradient that it accumulates, in 32: the norm that it tells, and both moments."""
    weights, batch = _adapted(drawn(rng, replace(work, targets="all")), work.targets), _batch(rng, work, 2, settings["multi_label"])
    steps = trial.devices.steps(replace(work, backend="fused"), weights, settings)
    before = steps.state()
    steps.call("accumulate", *batch)
    gradient = steps.gradient().astype(np.float64)
    steps.load(before)
    norm = float(np.linalg.norm(gradient))
    share = float(rng.uniform(0.2, 0.8))
    steps.set_norm(share * norm)
    clipped = share * gradient
    yield trial.near("16 bits: gradient_norm", norm, steps.call("train_batch", *batch)["gradient_norm"])
    for kind, expected in zip(MOMENTS, (0.1 * clipped, 0.001 * clipped**2), strict=True):
        found = np.concatenate([value.reshape(-1) for name, value in steps.state().items() if name.startswith(f"{kind}/")])
        yield trial.near(f"16 bits: {kind}", expected, found)


def _unusual_steps(trial: Trial) -> Iterator[Comparison]:
    """A step on samples of which the head is certain, so that the gradient is exactly zero; one with logits whose sum is infinite; one with
    labels between 0 and 1; one on more than 32,767 tokens, in texts of more than 255, of more classes than 255 and of tokens beyond 65,535;
    one on a token of a trainer of so short texts that more tokens fill up; and by the first token one of fewer samples than a micro-batch
    has, whose tokens are as many as a power of two, so that none fills up."""
    rng = trial.rng("unusual steps")
    work, settings = _drawn(rng, trial, 2, FAMILIES[trial.seed % 3])
    many = replace(work, family="llama", layers=1, heads=2, kv_heads=1, head_dim=8, hidden=16, intermediate=24)
    many = replace(many, seq=LONG, micro=1 + 2**15 // LONG, pooling="last", vocab=VOCABULARY, classes=LONG)
    many_settings = settings | {"max_norm": None, "scaling": {}, "class_weights": None}
    certain = {BIAS: np.array([0.0, 0.0, 200.0], np.float32), HEAD: np.zeros((3, work.hidden), np.float32)}
    large = {BIAS: np.full(3, 2e38, np.float32), HEAD: np.zeros((3, work.hidden), np.float32)}
    ids, mask, labels = _batch(rng, work, 2, False)
    short, even = replace(work, seq=2, micro=1), replace(work, seq=2**9, micro=3, pooling="first")
    soft = rng.uniform(0.1, 0.9, (2, work.classes)).astype(np.float32)
    full = rng.integers(0, many.vocab, (many.micro, LONG))
    asked: dict[str, tuple[Workload, dict[str, Any], Batch, dict[str, Array]]] = {
        "no gradient": (work, settings, (ids, mask, np.full_like(labels, 2)), certain),
        "large logits": (work, settings, (ids, mask, labels), large),
        "no token that fills up": (even, settings, _batch(rng, even, 2, False, (6, 6)), {}),
        "a token": (short, settings, (ids[:1, :2], np.array([[True, False]]), labels[:1]), {}),
        "labels between 0 and 1": (work, settings | {"multi_label": True, "class_weights": None}, (ids, mask, soft), {}),
        "many tokens": (many, many_settings, (full, np.ones(full.shape, bool), rng.integers(0, many.classes, many.micro)), {}),
    }
    for label, (of_one, changed, batch, state) in asked.items():
        weights, said = _adapted(drawn(rng, replace(of_one, targets="all")), of_one.targets), []
        for backend in ("torch", "fused"):
            steps = trial.devices.steps(replace(of_one, backend=backend), weights, changed)
            steps.load({**steps.state(), **state})
            said.append((steps.call("train_batch", *batch), steps.state()))
        (right, expected), (answer, found) = said
        told = [key for key in right if key != "correct" or of_one is work]  # of a hundred samples one may have two logits alike
        yield from (trial.near(f"{label}: {key}", right[key], answer[key]) for key in told)
        yield from _near_states(trial, label, expected, found, moving=label != "no gradient")


BROKEN = {
    "train_batch": ("attention_forward", "attention_backward", "rms_norm_backward", "adamw_moved"),
    "accumulate": ("rms_norm_backward", "attention_forward", "attention_backward"),
}
"""The functions in which Ctrl-C breaks a call off: those of the forward pass, of the backward pass, and of the step that moves the
parameters."""


def _broken_off(trial: Trial) -> Iterator[Comparison]:
    """Two trainers of unlike sizes make their calls in turns, and others before these are broken off: both do what they do alone."""
    rng = trial.rng("broken off")
    work, settings = _drawn(rng, trial, 2, FAMILIES[trial.seed % 3])
    other = replace(work, nf4=True, layers=1, hidden=64, intermediate=80, rank=work.rank + 1, classes=work.classes + 1)
    settings |= {"class_weights": None}
    given = [(each, _adapted(drawn(rng, replace(each, targets="all")), each.targets)) for each in (work, other)]
    calls = [(name, [_batch(rng, each, samples, False) for each in (work, other)]) for name, samples in CALLS]

    def made(which: Sequence[int], broken: bool) -> dict[str, Any]:
        found = dict[str, Any]()
        steps = {one: trial.devices.steps(replace(given[one][0], backend="fused"), given[one][1], settings) for one in which}
        for (number, (name, batches)), (one, each) in product(enumerate(calls), steps.items()):
            call = "train_batch" if name == "train_batch" else "accumulate"
            for function in BROKEN[call] if broken else ():
                found[f"{call} before call {number} of trainer {one}, in {function}"] = each.broken(function, call, *calls[0][1][one])
            found[f"call {number} of trainer {one}"] = {**each.call(name, *batches[one]), **each.state()}
        return found

    right, found = made([0], False) | made([1], False), made([0, 1], True)
    for label, answer in found.items():
        yield from same(label, right.get(label, "KeyboardInterrupt"), answer)


def _drawn(rng: Generator, trial: Trial, number: int, family: str) -> tuple[Workload, dict[str, Any]]:
    """No number is the one that a program would have by mistake."""
    several, still = number % 3 == 1, bool(number % 2)
    longest = 300 if trial.on_gpu else 6  # more than the fewest tokens that a step is captured for
    work = replace(small(rng, trial.seed, nf4=number % 3 == 0), family=family, layers=2, seq=longest, micro=3)
    work = replace(work, eps=float(rng.choice([0.01, 0.1])))
    theta = 50.0 if family == "llama" else float(rng.choice([50.0, 2e5]))  # with a large one so few tokens do not show the scaling
    work = replace(work, theta=theta, pooling=POOLINGS[number // 2 % 2], targets=str(rng.choice(TARGETS)))
    work = replace(work, alpha=float(rng.choice([0.75, 2.5])) * work.rank)
    work = replace(work, classes=3)  # so few that all of a sample's are right now and then
    weights = None if several or number % 3 == 0 else rng.uniform(0.3, 3.0, work.classes).tolist()
    settings = {"total_steps": 6, "learning_rate": 1e-2, "warmup_fraction": 0.5, "schedule": str(rng.choice(["linear", "cosine"]))}
    settings |= {"weight_decay": 0.5, "max_norm": MOTIONLESS if still else float(rng.choice([0.1, 100.0])), "class_weights": weights}
    return work, {**settings, "multi_label": several, "scaling": SCALED if family == "llama" else {}}


def _followed(
    trial: Trial, rng: Generator, work: Workload, settings: Mapping[str, Any], calls: Sequence[tuple[str, int]], plain: bool = True
) -> Iterator[Comparison]:
    weights = _adapted(drawn(rng, replace(work, targets="all")), work.targets)
    right, tried = (trial.devices.steps(replace(work, backend=each), weights, settings, plain) for each in ("torch", "fused"))
    if settings["multi_label"]:  # before the first step too
        yield _refuses_weights(trial, tried, work.classes, _batch(trial.rng("weights of classes"), work, 2, several=True))
    decay = settings["weight_decay"]
    for number, (name, samples) in enumerate(calls):
        batch = _batch(rng, work, samples, settings["multi_label"], LENGTHS[number > 0])
        for each in (right, tried):
            if number in WEIGHTS_WRITTEN:
                each.write_class_weights(1.5)
            if number == WEIGHTS_EXCHANGED and settings["class_weights"]:
                each.set_class_weights(settings["class_weights"][::-1])
            if number == WEIGHTS_BACK and settings["class_weights"]:
                each.put_class_weights_back()
        if number == RATE_SET:
            decay /= 4
            for each in (right, tried):
                each.set_decay(decay)
                each.set_rate(0.004)
                each.set_norm(settings["max_norm"] / 512)
                each.set_class_weights(_others(settings))
                each.move_elsewhere()
        label, before = f"call {number}, {name} of {samples}", tried.state()
        said, answer = right.call(name, *batch), tried.call(name, *batch)
        yield from (trial.near(f"{label}: {key}", value, answer[key]) for key, value in said.items())
        state, found = right.state(), tried.state()
        yield from _near_states(trial, label, state, found, moving=settings["max_norm"] != MOTIONLESS)
        yield from _moved(trial, label, before, found, decay)
        if settings["max_norm"] != MOTIONLESS and name != "accumulate":
            other = _another(rng, state)  # one for both, for where a gradient is noise Adam moves a parameter by all of the rate
            for each in (right, tried):
                each.load(other)
    yield from same("frozen tensors after the calls", right.frozen(), tried.frozen())
    if plain:
        yield from _refused(trial, rng, work, tried, settings["multi_label"])


def _others(settings: Mapping[str, Any]) -> list[float] | None:
    """None in the place of class weights, weights in the place of none, where a sample has one label."""
    return None if settings["multi_label"] or settings["class_weights"] else [0.5, 2.0, 3.0]


def _another(rng: Generator, state: Arrays) -> dict[str, Array]:
    """A state that the run could have had one step earlier: parameters and moments differ from those that the last step has left."""
    other = {name: value * np.float32(rng.uniform(2.0, 5.0)) for name, value in state.items() if name.startswith(MOMENTS)}
    other |= {
        name: value + rng.normal(0.0, 0.02, value.shape).astype(np.float32)
        for name, value in state.items()
        if name.startswith("trainable/")
    }
    return {**state, **other, "step": np.asarray(max(1, int(state["step"]) - 1))}


def _near_states(trial: Trial, label: str, state: Arrays, found: Arrays, moving: bool) -> Iterator[Comparison]:
    """Relative to the tensor's largest number, and a thousandth as much to that of all: some gradients are zero but for rounding."""
    yield from same(f"{label}: tensors of the state", sorted(state), sorted(found))
    largest = {group: max(float(np.abs(value).max()) for name, value in state.items() if name.startswith(group)) for group in MOMENTS}
    for name, value in state.items():
        if name in found and not (moving and name.startswith("trainable/")):
            limit = trial.literal(value).plus(Errors.flat(ROUNDING * largest.get(name.partition("/")[0], 0.0)))
            yield compare(f"{label}: {name}", value, found[name], limit, UNIT_ROUNDOFF["float32"])


def _moved(trial: Trial, label: str, before: Arrays, found: Arrays, decay: float) -> Iterator[Comparison]:
    """Parameters are where their own moments bring them (Loshchilov & Hutter 2019, Algorithm 2), whatever noise is in these."""
    if (step := int(found["step"])) == int(before["step"]):
        return
    rate = float(before["learning_rates"][step - 1])
    for name in (name.removeprefix("trainable/") for name in found if name.startswith("trainable/")):
        old, first, second = (
            value.astype(np.float64) for value in (before[f"trainable/{name}"], *(found[f"{kind}/{name}"] for kind in MOMENTS))
        )
        move = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        yield trial.near(f"{label}: trainable/{name} by its moments", old - rate * (move + decay * old), found[f"trainable/{name}"])


def _adapted(weights: Arrays, targets: str) -> dict[str, Array]:
    """The weights without the updates of other projections than the targets."""
    adapted = {"q_v": ("q_proj", "v_proj"), "all": ("_proj",)}.get(targets, tuple(targets.split(",")))
    return {name: value for name, value in weights.items() if ".lora_" not in name or name.partition(".lora_")[0].endswith(adapted)}


def _batch(rng: Generator, work: Workload, samples: int, several: bool, lengths: Sequence[int] = LENGTHS[0]) -> Batch:
    """Samples with padding anywhere, each with a real token, and now and then wider than a sample may be long.

    Where there are more samples than a micro-batch has, the first one is full: the next one has fewer tokens, as later calls have. Where
    there are as many as `lengths`, they have so many sixths of the tokens that a sample may have.
    """
    mask = (rng.random((samples, work.seq)) < 0.7) | ((samples > work.micro) & (np.arange(samples) < work.micro))[:, None]
    mask[np.arange(samples), rng.integers(0, work.seq, samples)] = True
    if samples == len(lengths):
        mask = rng.permuted(np.arange(work.seq) < rng.permuted(lengths)[:, None] * work.seq // 6, axis=1)
    wider = int(rng.integers(0, 4))
    mask = np.roll(np.pad(mask, ((0, 0), (0, wider))), int(rng.integers(0, wider + 1)), axis=1)
    labels = rng.integers(0, 2, (samples, work.classes)) if several else rng.integers(0, work.classes, samples)
    labels = labels.astype(str(rng.choice(["float32", "float64"]))) if several else labels
    return rng.integers(0, work.vocab, mask.shape), mask, labels


def _refused(trial: Trial, rng: Generator, work: Workload, tried: "Steps", several: bool) -> Iterator[Comparison]:
    """What a captured step cannot look at is looked at before."""
    before = tried.state()
    ids, mask, labels = _batch(rng, work, 2, several)
    wrong, below, none = labels.copy(), labels.copy(), labels.copy()
    wrong[-1], below[-1], none[-1] = (2.0, -0.5, np.nan) if several else (work.classes, -1, -1)
    long = 2 * mask.shape[1]
    padded = np.pad(ids, ((0, 0), (0, 1)), constant_values=work.vocab), np.pad(mask, ((0, 0), (0, 1))), labels
    bad: dict[str, tuple[Batch, str]] = {
        "no sample": ((ids[:0], mask[:0], labels[:0]), "empty"),
        "a token below zero": ((np.where(np.arange(ids.shape[1]), ids, -1), mask, labels), "input_ids"),
        "a label below zero": ((ids, mask, below), "label"),
        "a label that is no number": ((ids, mask, none), "label"),
        "a sample without a token": ((ids, mask & (np.arange(2)[:, None] == 1), labels), "mask"),
        "a token that is none": ((np.full_like(ids, work.vocab), mask, labels), "input_ids"),
        "a padding that is no token": (padded, "input_ids"),
        "a label that is none": ((ids, mask, wrong), "label"),
        "a mask of whole numbers": ((ids, mask.astype(np.int64), labels), "mask is torch.int64"),
        "a sample that is too long": ((np.tile(ids, 2), np.tile(np.ones_like(mask), 2), labels), rf"\b{long} tokens"),
        "fewer labels than samples": ((ids, mask, labels[:1]), "labels"),
        "labels of another kind": ((ids, mask, labels.argmax(1) if several else np.eye(work.classes, dtype=np.float32)[labels]), "labels"),
    }
    for (name, (batch, message)), call in product(bad.items(), ("accumulate", "train_batch")):
        yield trial.refuses(f"{name}, {call}", partial(tried.call, call, *batch), message, "ValueError")
    if several:
        yield _refuses_weights(trial, tried, work.classes, (ids, mask, labels))
    yield from same("state after bad batches", before, tried.state())
    yield from _out_of_turn(trial, tried, (ids, mask, labels))
    yield from _failing_late(trial, rng, work, tried, before, several)
    tried.load(before)
    if several:  # an infinite logit makes the loss infinite
        return
    last, other = np.arange(work.classes) == work.classes - 1, np.minimum(labels, work.classes - 2)
    spoiled = {**before, BIAS: np.where(last, np.float32(-np.inf), before[BIAS])}
    tried.load(spoiled)
    for call in ("accumulate", "train_batch"):
        ask = partial(tried.call, call, ids, mask, other)
        yield trial.refuses(f"an infinite logit of a class that is no label, {call}", ask, "logits", "ValueError")
    left = tried.state()  # where what was infinite may have become NaN, as inf - 0 × inf is
    yield from same("state after an infinite logit", spoiled, {**left, BIAS: np.where(last, spoiled[BIAS], left[BIAS])})
    tried.load({**before, BIAS: np.where(last, np.float32(3e38), np.float32(-3e38))})
    ask = partial(tried.call, "train_batch", ids, mask, other)
    yield trial.refuses("an infinite loss of finite logits", ask, r"norm is [0-9.e+-]+ and the loss inf", "FloatingPointError")
    steep = {**before, BIAS: np.where(last, np.float32(3e37), before[BIAS]), HEAD: np.where(last[:, None], np.float32(1e30), before[HEAD])}
    tried.load(steep)
    yield trial.refuses("an infinite norm of a finite loss", ask, r"norm is inf and the loss [0-9.e+]+", "FloatingPointError")
    yield from same("state after an infinite norm", steep, tried.state())


def _refuses_weights(trial: Trial, tried: "Steps", classes: int, batch: Batch) -> Comparison:
    tried.set_class_weights([1.0] * classes)
    refused = trial.refuses(
        "weights of classes with several labels", partial(tried.call, "train_batch", *batch), "class weights", "ValueError"
    )
    tried.set_class_weights(None)
    return refused


def _failing_late(trial: Trial, rng: Generator, work: Workload, tried: "Steps", state: Arrays, several: bool) -> Iterator[Comparison]:
    """Samples wait for their step as they were, where a call of more micro-batches than are held fails in its last one."""
    few, (ids, mask, labels) = _batch(rng, work, 2, several), _batch(rng, work, MANY * work.micro, several)
    labels[-1] = 2 if several else work.classes
    made = []
    for fails in (False, True):
        tried.load(state)
        tried.call("accumulate", *few)
        if fails:
            ask = partial(tried.call, "accumulate", ids, mask, labels)
            yield trial.refuses("a label that is none, late", ask, rf"labels\[{len(labels) - 1}\b", "ValueError")
        made.append((tried.call("apply", *few), tried.state()))
    (said, expected), (answer, found) = made
    yield from same("what a step says of samples that waited", said, answer)
    yield from same("state after a step on samples that waited", expected, found)


def _out_of_turn(trial: Trial, tried: "Steps", batch: Batch) -> Iterator[Comparison]:
    """A batch is refused while samples wait, which wait on, and a step after the last of the schedule."""
    tried.call("accumulate", *batch)
    before = tried.state()
    yield trial.refuses("a batch while samples wait", partial(tried.call, "train_batch", *batch), "wait", "RuntimeError")
    yield from same("state after a batch while samples wait", before, tried.state())
    yield from same("samples that waited", len(batch[0]), int(tried.call("apply", *batch)["total"]))
    ended = {**before, "step": np.asarray(len(before["learning_rates"]))}
    tried.load(ended)
    yield trial.refuses("a step after the last", partial(tried.call, "train_batch", *batch), "schedule ends", "IndexError")
    yield from same("state after a step after the last", ended, tried.state())
