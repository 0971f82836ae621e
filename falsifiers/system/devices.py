"""Devices: which one a name gives, whether all tensors are on it, what arrives there, and values there that are not finite."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_at_most
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.devices import TABLE, Chosen, Plant, Workload
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import drawn, small, split

LARGEST_INDEX = 15
LONG = 2**14
"""Tokens of a text whose scores, 2 GiB with a mask, are no matter of little memory."""
ALGORITHMS = 12
"""So many algorithms a product has at most."""


def auto_alone_falls_back(trial: Trial) -> Iterator[Comparison]:
    """On hosts with none to three cards every name of the grammar gives its device, or a refusal, with the right number of warnings. So it
    is on one with two cards that CUDA cannot use, though its driver lists them."""
    yield trial.refuses(
        "a card of too large a number", partial(trial.devices.choose, f"cuda:{LARGEST_INDEX + 1}", {"cuda": 99}), "expected", "ValueError"
    )
    for cards, unusable in ((0, 0), (1, 0), (2, 0), (3, 0), (0, 2)):
        for name in ("cpu", "auto", "cuda", *(f"cuda:{index}" for index in (0, 1, 2, LARGEST_INDEX))):
            label, ask = f"{name}, {cards} cards, {unusable} unusable", partial(trial.devices.choose, name, {"cuda": cards}, unusable)
            index, falls_back = int(name.partition(":")[2] or 0), name == "auto" and not cards
            if name.startswith("cuda") and index >= cards:
                yield trial.refuses(label, ask, name, "DeviceUnavailable")
            else:
                expected = Chosen("cpu" if name == "cpu" or falls_back else "cuda", index, int(falls_back))
                yield from same(label, expected, ask())


TOO_LONG = "max_seq_len or batch_size"
TAKEN_BACK = ("active_file", "inactive_file", "slab_reclaimable")
"""The memory of a control group that the kernel takes back where it is short, by the names in memory.stat."""


def long_texts_need_memory(trial: Trial) -> Iterator[Comparison]:
    """Attention over texts for which the host has too little memory is refused before it is taken, of however many heads, and not where it
    has room for scores and a mask. A text of some GiB is one for which it is asked. What it has is what it says to be available, whatever
    is free or in all, and what the limits of its container leave; where it does not say that, its free pages count, and a little text is no
    matter."""
    rng = trial.rng("host")
    batch, seq, heads = int(rng.integers(3, 7)), 16 * int(rng.integers(4, 9)), int(rng.integers(2, 5))
    scores = batch * seq**2 * 4 // 1024  # kB of one score a pair of tokens, in float32
    with tempfile.TemporaryDirectory() as folder:
        said, path = Path(folder), Path(folder) / "meminfo"
        for available, other in product((scores - 1, 2 * scores, 64 * scores), (0, 10**6)):
            named = {"MemTotal": 10**7, "MemFree": other, "MemAvailable": available, "Buffers": other, "Cached": other, "SwapFree": other}
            path.write_text("".join(f"{f'{name}:':15} {count:9} kB\n" for name, count in named.items()))
            label, ask = (
                f"{scores} kB of {available} kB available and {other} kB free",
                partial(trial.devices.attend, batch, seq, heads, said),
            )
            if available < scores:
                yield trial.refuses(label, ask, TOO_LONG, "MemoryError")
            else:
                yield from same(label, [batch, seq, heads, 2], list(ask().shape))
        path.write_text(f"MemAvailable: {LONG**2 // 512} kB\n")
        yield trial.refuses(f"a text of {LONG} tokens", partial(trial.devices.attend_long, LONG, said), "max_seq_len", "MemoryError")
        for content in ("MemTotal: 1 kB\n", "", "MemAvailable: many kB\n"):
            path.write_text(content)
            yield from same("where it does not say", [1, 2, 1, 2], list(trial.devices.attend(1, 2, 1, said).shape))
        for available in (scores - 1, 64 * scores):
            pages = {"SC_AVPHYS_PAGES": available, "SC_PHYS_PAGES": 10**7, "SC_PAGE_SIZE": 1024}
            (said / "pages").write_text(json.dumps(pages))
            label, ask = f"{scores} kB of {available} free pages", partial(trial.devices.attend, batch, seq, heads, said)
            if available < scores:
                yield trial.refuses(label, ask, TOO_LONG, "MemoryError")
            else:
                yield from same(label, [batch, seq, heads, 2], list(ask().shape))
        (said / "pages").unlink()
        path.write_text(f"MemAvailable: {64 * scores} kB\n")
        for label, fits in _containers(said, scores):
            ask = partial(trial.devices.attend, batch, seq, heads, said)
            yield from (
                same(label, [batch, seq, heads, 2], list(ask().shape)) if fits else [trial.refuses(label, ask, TOO_LONG, "MemoryError")]
            )


def _containers(said: Path, scores: int) -> Iterator[tuple[str, bool]]:
    """Writes the limits of a container and of the group above it into files beside `said`, one case after the other, and yields each case's
    name and whether `scores` kB and a mask fit. Files and what the kernel keeps may take a part of the memory, which the system takes back;
    files that have no other place than memory are no room. A group may have no limit, and no memory that it counts; it may not be seen
    from within a container, which sees the groups above."""
    full = 50 * scores
    files, nothing = {"active_file": 10 * scores, "inactive_file": 10 * scores}, dict[str, int]()
    asked: dict[str, tuple[int | None, Mapping[str, int], int | None, bool]] = {
        "a limit that leaves too little": (full + scores - 1, nothing, None, False),
        "a limit that leaves enough": (full + 4 * scores, nothing, None, True),
        **{f"a limit that {name} reaches": (full, {name: 20 * scores}, None, True) for name in TAKEN_BACK},
        "a limit that files in memory alone reach": (full, {"file": full, "shmem": full, "inactive_anon": full}, None, False),
        "a limit that is passed": (full - scores, nothing, None, False),
        "no limit": (None, nothing, None, True),
        "no limit below one that leaves too little": (None, nothing, full, False),
        "a limit below one that leaves too little": (2 * full, nothing, full, False),
        "a limit below one that files reach": (2 * full, files, full, True),
        "little that is used below a limit that others fill": (None, nothing, full, False),
        "little that is used of a limit below a larger one that others fill": (full, nothing, full + scores - 1, False),
    }
    groups = said / "groups"
    places = {"0::/pods/one": groups / "pods", "4:memory:/elsewhere\n0::/a/b/c": groups / "a", "0::/": None}
    places["0::/d/e:cri-containerd:9e07"] = groups / "d"  # a name may have colons, and containerd's do
    places["0::/f/two words"] = groups / "f"
    for name, above in places.items():
        own = groups / name.rpartition("0::/")[2]
        own.mkdir(parents=True, exist_ok=True)
        (said / "cgroup").write_text(f"{name}\n")
        for label, (limit, kept, upper, fits) in asked.items():
            if above is None and upper:
                continue
            _say(own, limit, full // 10 if label.startswith("little") else full, kept)
            if above is not None:
                _say(above, upper, full, kept)
            yield f"{name}: {label}", fits
    (said / "cgroup").write_text("0::/g/h/i\n")
    for limit in (full + scores - 1, full + 4 * scores):
        for place, (most, used) in {"g": (4 * full, 2 * full), "g/h": (limit, full), "g/h/i": (2 * full, full // 10)}.items():
            (groups / place).mkdir(parents=True, exist_ok=True)
            _say(groups / place, most, used, nothing)
        yield f"three groups: a limit of {limit} kB of the one in the middle", limit > full + scores
    for name in ("unseen", "unseen/and/below", "../beside"):  # as of a process that was moved out of its container's groups
        (said / "cgroup").write_text(f"0::/{name}\n")
        for limit in (full, full + 4 * scores):
            _say(groups, limit, full, nothing)
            yield f"{name}: a limit of {limit} kB above a group that is not seen", limit > full
    (said / "cgroup").write_text("4:memory:/pods/one\n")
    yield "groups of an older kind", True


def _say(group: Path, limit: int | None, used: int, kept: Mapping[str, int]) -> None:
    """Write a control group's files: its limit and its use in kB, and how much of the use is `kept` for each name of memory.stat,
    in which the inactive is before the active and which has no slab_reclaimable by some kernels. As nearly every group, it has no soft
    limit, which is another file."""
    (group / "memory.high").write_text("max\n")
    (group / "memory.max").write_text("max\n" if limit is None else f"{1024 * limit}\n")
    (group / "memory.current").write_text(f"{1024 * used}\n")
    stated = {"anon": 7} | dict.fromkeys(TAKEN_BACK[:-1], 0) | {name: 1024 * count for name, count in kept.items()}
    (group / "memory.stat").write_text("".join(f"{name} {stated[name]}\n" for name in sorted(stated, reverse=True)))


def accelerators_have_their_torch_names(trial: Trial) -> Iterator[Comparison]:
    """On hosts with one or two devices of a kind, its names give them and no other kind's names do; `auto` takes none but CUDA's.

    ROCm's devices are those of `cuda` to torch, by that name and by `hip`. MAIA's stand for kinds that torch alone names.
    """
    for kind in ("xpu", "mps", "hip", "maia"):
        for count, asked in product((1, 2), ("xpu", "mps", "hip", "maia")):
            for index in range(3):
                name = asked if index == 2 else f"{asked}:{index}"
                label, ask = f"{name} with {count} of {kind}", partial(trial.devices.choose, name, {kind: count})
                if asked == kind and index % 2 < count:
                    yield from same(label, Chosen("cuda" if kind == "hip" else kind, index % 2, 0), ask())
                else:
                    error = "ValueError" if asked == "maia" != kind else "DeviceUnavailable"
                    yield trial.refuses(label, ask, re.escape(repr(name)), error)
        cuda = Chosen("cuda", 0, 0) if kind == "hip" else Chosen("cpu", 0, 1)
        yield from same(f"auto with {kind}", cuda, trial.devices.choose("auto", {kind: 1}))


def stray_tensor_is_named(trial: Trial) -> Iterator[Comparison]:
    """A model in its place passes; a parameter, a buffer, a gradient or a tensor of the optimiser elsewhere is refused by its name, be it a
    single number without an axis too.

    CUDA without a number is its current device.
    """
    rng = trial.rng("stray tensor")
    work = small(rng, trial.seed, nf4=True, double_quantize=True)
    layer = f"model.layers.{rng.integers(work.layers)}"
    quantised = rng.choice(["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"])
    astray = [
        f"{layer}.{quantised}.quantized.{rng.choice(['codes', 'absmax', 'absmax_scales'])}",
        f"{layer}.{quantised}.quantized.absmax_offset",
        f"{layer}.self_attn.{rng.choice(['q', 'v'])}_proj.lora_{rng.choice(['A', 'B'])}.weight",
        f"{layer}.{rng.choice(['input', 'post_attention'])}_layernorm.weight",
        str(rng.choice(["model.embed_tokens.weight", "model.norm.weight"])),
        str(rng.choice(["score.weight", "score.bias"])),
        f"the gradient of {layer}.self_attn.{rng.choice(['q', 'v'])}_proj.lora_{rng.choice(['A', 'B'])}.weight",
        f"optimiser.parameters['score.{rng.choice(['weight', 'bias'])}']",
        "optimiser.exp_avg",
        "optimiser.exp_avg_sq",
        f"optimiser.{rng.choice(['_rows', '_elements'])}",
        f"{layer}.self_attn.{TABLE}",
    ]
    weights = drawn(rng, work)
    yield from _on_one_of_two_cards(trial, trial.devices.trainer(work, weights), *rng.permutation(LARGEST_INDEX)[:2].tolist())
    for name in astray:
        trainer = trial.devices.trainer(work, weights)
        trainer.require_resident()
        other = int(rng.integers(1, LARGEST_INDEX))
        ask = partial(trainer.require_resident, other)
        yield trial.refuses(f"a model that is not on card {other}", ask, f"not on cuda:{other} ", "NotResident")
        trainer.move(name)
        where = r"cpu, not on cuda" if trial.on_gpu else "meta, not on cpu"
        yield trial.refuses(name, trainer.require_resident, f"^{re.escape(name)} is on {where}", "NotResident")


def _on_one_of_two_cards(trial: Trial, trainer: Any, used: int, other: int) -> Iterator[Comparison]:
    """A model is on its own card and not on another one of that kind, if the process holds memory there."""
    ask = trainer.require_on_card
    ask(used, used, {used: 1})
    yield trial.refuses("a model on another card", partial(ask, used, other, {used: 1, other: 1}), f"not on cuda:{other} ", "NotResident")
    nothing = partial(ask, used, used, {each: 1 for each in range(LARGEST_INDEX + 2) if each != used})
    yield trial.refuses("a model that takes no memory", nothing, f"cuda:{used}, .*holds no memory", "NotResident")


def last_rows_are_as_alone(trial: Trial) -> list[Comparison]:
    """On more elements than 32 bits count kernels give for the last rows, bit for bit, what they give for these alone."""
    return [each for name, whole, alone in trial.devices.last_rows() for each in same(name, alone, whole)]


def repeated_is_the_same(trial: Trial) -> Iterator[Comparison]:
    """On thousands of rows kernels give the same bits whenever they are asked again, and tuned products have an algorithm of equal bits.

    It is the fastest of those, whatever others fail or give other bits or none. The standard one, which is the first, is among them. Where
    the library is not there, or refuses a product, that is torch's own, and so it is for operands of another form than the tuned ones.
    """
    rng = trial.rng("algorithms")
    yield from (each for name, changed in trial.devices.changed_when_repeated().items() for each in same(f"{name}, again", 0, changed))
    for number in range(ALGORITHMS):
        gives = ["same", *rng.choice(["same", "other", "none", "fail"], number).tolist()]
        times = rng.permutation(len(gives)).tolist()
        best = min((time, place) for place, (time, each) in enumerate(zip(times, gives, strict=True)) if each == "same")[1]
        yield from same(f"the fastest of {gives}, in {times}", best, trial.devices.fastest(gives, times))
    for error in (OSError("no such library"), RuntimeError("status 15")):
        yield from same(f"a product where tuning ends with {error!r}", True, trial.devices.product_after(error))
    for label, (right, found) in trial.devices.tuned_products().items():
        yield from same(f"a product of operands {label}", right, found)


def late_streams_change_nothing(trial: Trial) -> list[Comparison]:
    """A step through the hand-written layers on NF4 leaves the same bits, whichever of its streams is late, and frees nothing too soon.

    On a GPU it does so too while another thread uses the GPU, from its capture on.
    """
    rng, contents = trial.rng("late"), dict[str, dict[str, bytes]]()
    lates, layers = (("main", "side", "thread"), 2) if trial.on_gpu else (("side",), 1)
    work = replace(small(rng, trial.seed, nf4=True), backend="fused", targets="all", layers=layers, batch=2)
    weights = drawn(rng, work)
    for late in ("none", *lates):
        trainer = trial.devices.trainer(work, weights)
        trainer.step_late(late)
        contents[late] = trainer.content()
    two = replace(work, layers=2)  # a layer's tensors are let go of when the next one is computed
    freed = trial.devices.trainer(two, drawn(rng, two)).freed_too_soon()
    bits = [each for late in lates for each in same(f"late: {late}", contents["none"], contents[late])]
    return [*same("read beside after it was freed", [], freed), *bits]


def origin_is_named(trial: Trial) -> Iterator[Comparison]:
    """A value planted in a parameter, in the output of a call or in the gradient that a call passes on is found by its place.

    The value in the parameter is its last number, and the parameter is searched in several parts. A scale of a weight in NF4 is found
    too, and so is a loss that overflows by its class weights alone. A search that fails does not say that all is finite.
    """
    rng = trial.rng("origin")
    work, part = small(rng, trial.seed, nf4=False), int(rng.integers(5, 15))
    weights = drawn(rng, work)
    for plant, place in _plants(rng, work):
        trainer = trial.devices.trainer(work, weights)
        if plant:
            trainer.plant(plant)
        before, label = trainer.content(), _label(plant, place)
        origin = trainer.origin(part)
        named = _names(origin, plant, place)
        yield _said(label, named, place or "none", str(origin))
        yield value_at_most(f"tensors changed by asking: {label}", _differing(before, trainer.content()), 0)
        yield value_at_most(f"gradients left by asking: {label}", len(trainer.gradients()), 0)
    trainer = trial.devices.trainer(work, weights)
    for failing in ("attention", "gradient of attention"):
        for error in ("OutOfMemoryError", "RuntimeError"):
            said = trainer.origin_broken_off(failing, error)
            yield _said(f"{error} in the search's {failing}", said is not None, "what failed", "that all is finite")
    yield from _of_the_whole_model(trial, rng, part)


def _names(origin: str | None, plant: Plant | None, place: str) -> bool:
    """Whether the answer names the place and says whether NaN or an infinity stood there, and not the other kind. Without a plant the
    answer must be None."""
    if plant is None:
        return origin is None
    kind = "NaN" if np.isnan(plant.value) else "infinite"
    return re.match(rf"{re.escape(place)}[: ].*\b1 {kind} of \d", origin or "") is not None and " 0 " not in str(origin)


def _of_the_whole_model(trial: Trial, rng: Generator, part: int) -> Iterator[Comparison]:
    """Finite class weights under which the loss is infinite, and a bad scale of a weight in NF4, are found. Numbers in several parts of a
    parameter are counted together."""
    work = small(rng, trial.seed, nf4=True)
    trainer = trial.devices.trainer(work, drawn(rng, work))
    largest = np.full(work.classes, np.finfo(np.float32).max, np.float32)
    said = trainer.origin(part, largest)
    yield _said(
        "class weights that make the loss overflow",
        (said or "").startswith("loss (weighted_cross_entropy): 1 infinite of 1"),
        "loss",
        str(said),
    )
    for kind, value in (("NaN", np.nan), ("infinite", np.inf)):
        weights = np.where(np.arange(work.classes) == 0, value, 1.0).astype(np.float32)
        said = trainer.origin(part, weights)
        named = re.search(rf"\bclass_weights\b.*\b1 {kind} of {work.classes}", said or "") is not None
        yield _said(f"a class weight that is {value}", named, "class_weights", str(said))
    labels = np.eye(work.batch, work.classes, dtype=np.float32)
    labels[-1, 0] = np.nan
    said = trainer.origin(part, labels=labels)
    named = re.search(rf"input (labels|targets)\b.*\b1 NaN of {labels.size}", said or "") is not None
    yield _said("a label, of several, that is NaN", named, "the labels", str(said))
    trainer = trial.devices.trainer(work, drawn(rng, work))
    trainer.plant(Plant("parameter", "model.norm.weight", np.nan, both=True))
    yield from same("NaN in two parts", f"parameter model.norm.weight: 2 NaN of {work.hidden}", trainer.origin(part))
    trainer = trial.devices.trainer(work, drawn(rng, work))
    trainer.join_trained()
    trainer.plant(Plant("parameter", "score.bias", np.nan))
    yield from same("NaN in one of parameters in one memory", f"parameter score.bias: 1 NaN of {work.classes}", trainer.origin(part))
    for double, last in ((False, "absmax"), (True, "absmax_scales"), (True, "absmax_offset")):
        again = replace(work, double_quantize=double)
        trainer = trial.devices.trainer(again, drawn(rng, again))
        scales = str(rng.choice(sorted(name for name in trainer.content() if name.endswith(f".{last}"))))
        plant = Plant("parameter", scales, _bad(rng))
        trainer.plant(plant)
        said = trainer.origin(part)
        yield _said(f"{last} {plant.value} in NF4", _names(said, plant, f"buffer {scales}"), scales, str(said))


def non_finite_stops_the_step(trial: Trial) -> Iterator[Comparison]:
    """A step with a value planted raises, and changes neither weights nor moments; without one it does both. Calls are those of automatic
    differentiation; a parameter is every backend's, and an infinite logit of a class that is no label leaves loss and gradient finite."""
    rng = trial.rng("stop")
    work = small(rng, trial.seed, nf4=bool(rng.integers(2)))
    none, *others = _plants(rng, work)
    logit, weights = Plant("parameter", "score.bias", -np.inf), drawn(rng, work)
    for backend in trial.trainer.backends:
        for plant, place in (none, (logit, "a logit"), *others):
            if backend != "torch" and plant and plant.where != "parameter":
                continue
            trainer, label = trial.devices.trainer(replace(work, backend=backend), weights), f"{backend}: {_label(plant, place)}"
            trainer.step()
            if plant:
                trainer.plant(plant)
            before = trainer.content()
            if plant and backend == "torch":
                trainer.origin(work.vocab)  # once it is named, the next step stops as the first one did
            if plant:
                yield trial.refuses(f"stopped, {label}", trainer.step, r"finite|\b(nan|inf)\b", "ValueError|FloatingPointError")
                yield value_at_most(f"tensors changed, {label}", _differing(before, trainer.content()), 0)
            else:
                trainer.step()
                yield _said(f"changed, {label}", _differing(before, trainer.content()) > 0, "a step", "no tensor is another")


def _plants(rng: Generator, work: Workload) -> Iterator[tuple[Plant | None, str]]:
    """Gives nothing planted first, and then bad values with the place that has to be named."""
    layer, layers = int(rng.integers(1, work.layers)), work.layers
    path = f"model.layers.{layer}"
    yield None, ""
    for name in (f"{path}.{part}.weight" for part in ("input_layernorm", "self_attn.q_proj.lora_B")):
        yield Plant("parameter", name, _bad(rng)), f"parameter {name}"
    calls = {
        "swiglu": (layer, layers, f"{path}.mlp.swiglu"),
        "attention": (layer, layers, f"{path}.self_attn.attention"),
        "rms_norm": (2 * layer + 1, 2 * layers + 1, f"{path}.post_attention_layernorm"),
        "residual_add": (2 * layer, 2 * layers, f"{path}.attention_residual"),
    }
    operations = [("output", str(rng.choice(list(calls)))), *(("gradient", each) for each in calls)]
    for where, operation in operations:
        nth, count, place = calls[operation]
        yield Plant(where, operation, _bad(rng), nth, count), place


def _bad(rng: Generator) -> float:
    return float(rng.choice([np.nan, np.inf, -np.inf]))


def _label(plant: Plant | None, place: str) -> str:
    return f"{plant.where} {plant.value} at {place}" if plant else "nothing planted"


def arrives_and_comes_back(trial: Trial) -> list[Comparison]:
    """Every tensor put on the device is there bit for bit; after a step the trained ones come back the same from model and state."""
    rng = trial.rng("sync")
    work = replace(small(rng, trial.seed, nf4=False), dtype=str(rng.choice(["float32", "bfloat16"])))
    weights = drawn(rng, work)
    base, trained = split(work, weights)
    trainer = trial.devices.trainer(work, weights)
    dtype = ml_dtypes.bfloat16 if work.dtype == "bfloat16" else np.float32
    sent = {name: value.astype(dtype).tobytes() for name, value in base.items()}
    sent |= {name: value.tobytes() for name, value in trained.items()}
    held = {name: value for name, value in trainer.content().items() if not name.startswith("optimiser.")}
    trainer.step()
    kept = {name: value for name, value in trainer.content().items() if name in trained}
    return [*same("as sent", sent, held), *same("in the state as in the model", kept, trainer.reported())]


def _differing(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> int:
    return sum(before.get(name) != after.get(name) for name in {**before, **after})


def _said(name: str, right: bool, expected: str, actual: str) -> Comparison:
    return Comparison(name, True, 0.0, "text") if right else broken(name, "another answer", expected, actual)
