"""Memory that training takes: the estimate against the architecture and against measures, loading, many steps, and one model's peak."""

import json
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from blackswan.falsifiers.numeric.comparison import (
    Comparison,
    value_at_least,
    value_at_most,
    value_inside,
    value_within,
    value_within_factor,
)
from blackswan.falsifiers.numeric.whole_model import SHAPES
from blackswan.falsifiers.subjects.doors.devices import Estimate, Growth, Workload
from blackswan.falsifiers.system.resident import stays
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.saved_by_layers import kept_by_a_layer
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import BLOCK, BYTES, FAMILIES, counts, drawn, scale_bytes, small, split
from blackswan.reference.table import Array

DEEP = 24
"""So many layers that the peak is that of a step, where the peak of a few is that of loading."""
ROUNDED = 512
"""Bytes that CUDA's allocator rounds a tensor up to."""
WORKSPACE = 32 * 2**20
"""Bytes of cuBLAS's workspace on an H100, more than on other GPUs; one for the forward pass's thread and stream and one for autograd's."""
FUSED_STREAMS = 3
"""Streams that the hand-written layers give cuBLAS's work to: the captured one, one beside it, and the current one."""
TRANSIENT = ("activations", "gradients", "update", "batch", "working", "logits")
SHORTER = 4
"""How much shorter short texts are."""
STEPS_AT_THE_PEAK = {"torch": 1, "fused": 3}
"""The hand-written layers capture their graph in the first, and the next have the state of all before."""
HELD = 4
"""Gradients of micro-batches that are kept side by side; one more, and they are averaged."""
MANY = (8, 33)
"""Micro-batches of a step, more than are held, after which a step's passes repeat themselves."""
LOOKED_AT = (2**24, 2**25)
"""Numbers of a weight, more than are looked at together, and of one twice as large."""
LEFT = 40
"""Megabytes that such a look may leave: as much as it takes for the numbers that are looked at together."""
LENGTHS, EVER_NEW = 3, 48
"""Lengths that are seen again and again, and that are new to either half of a run."""
STEPS = {"cpu": 30, "cuda": 1000}
MEASURES = {"cpu": ("bytes", "tensors", "peak"), "cuda": ("bytes", "tensors", "reserved", "segments", "driver")}
"""What must not grow. A CPU's memory comes from the system's allocator, of which nobody counts what it holds in reserve."""
GIB, MEGABYTE = 2**30, 10**6
LIMITS = {"torch": 4.0, "fused": 3.5}
"""GiB at most for a QLoRA step of a 0.5B model, 16 samples of 256 tokens. The first is what its card was said to need; the second is the
backend's that a GPU runs by default, which keeps less for the backward pass."""
RUN: Mapping[str, Any] = {"classes": 5, "rank": 16, "alpha": 32.0, "nf4": True, "dtype": "bfloat16"}
LARGE = Workload(**SHAPES["qwen2.5-0.5b"], **RUN, batch=16, seq=256)
SIZES: Mapping[str, Any] = {"family": "llama", "vocab": 40, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
SMALL = Workload(**SIZES, **RUN, intermediate=128, layers=2, batch=3, seq=16)
"""This classifier is measured without a GPU, in one of the families."""


def estimate_counts_every_part(trial: Trial) -> list[Comparison]:
    """The estimate has every part of the run, and weights and moments in it are a count of the architecture's bytes.

    So it is with double quantisation, which does not make the backward pass keep more. The estimate is the same when it is asked again,
    also where its rotary angles have not been computed before, and for a card by its number; of cards that are here each is asked itself.
    What a step needs that is far beyond this host's memory is estimated as any other's. Without content as much is counted as with it.
    """
    rng = trial.rng("parts")
    plain = replace(
        small(rng, trial.seed, nf4=bool(rng.integers(2))), dtype=list(BYTES)[trial.seed % 2], theta=float(rng.uniform(1e3, 1e5))
    )
    single = replace(plain, nf4=True)
    double = replace(single, double_quantize=True)
    found = {work: trial.memory.estimate(work) for work in dict.fromkeys((plain, single, double))}
    beyond = found[double].parts.get("activations", 0) - found[single].parts.get("activations", 0)
    wider = trial.memory.estimate(replace(single, vocab=single.vocab + int(rng.integers(1, 10**4)))).parts
    beside = same("quantisation, with a larger embedding", found[single].parts.get("quantisation", 0), wider.get("quantisation", 0))
    beside.append(value_at_least("quantisation", found[single].parts.get("quantisation", 0.0), 1.0))
    less = value_at_most("double quantisation: activations beyond those without it", beyond, 0)
    of_a_cpu = {work: trial.memory.estimate(work, "cpu").total for work in (single, double)}  # on a card small tensors take whole blocks
    more = max(0, of_a_cpu[double] - of_a_cpu[single])
    in_all = value_at_most("double quantisation on the CPU: bytes in all beyond those without it", more, 0)
    every = [part for work in (plain, double) for part in _every_part(trial, work, found[work])]
    number, as_text = int(rng.integers(16)), bool(trial.seed // 2 % 2)
    first, again = (trial.memory.estimate(plain, kind, as_text=as_text) for kind in ("cuda", f"cuda:{number}"))
    of_a_card = first.parts
    least = value_at_least("library_workspace on a GPU that is not here", of_a_card.get("library_workspace", 0), 2 * WORKSPACE)
    rounded = same("parts on CUDA that are no blocks", [], [name for name, count in of_a_card.items() if count % ROUNDED])
    for nothing, backend in product(
        (replace(plain, batch=0), replace(plain, seq=0), replace(plain, accumulation=0), replace(plain, accumulation=-1)),
        ("torch", "fused"),
    ):
        ask, count = partial(trial.memory.estimate, replace(nothing, backend=backend)), min(nothing.accumulation, 0)
        every.append(trial.refuses(f"{backend}: a step of nothing", ask, f"is {count}: expected at least 1", "ValueError"))
    for other in ("mps", "xpu:1"):
        ask = partial(trial.memory.estimate, plain, other)
        every.append(trial.refuses(f"a device whose kernels nobody counted, {other}", ask, f"{other}.*expected cpu or cuda", "ValueError"))
    every += _counted_by(trial)
    every += same("peaks of some passes, counted without content", *map(trial.memory.counted, ("cpu", "meta")))
    huge = trial.memory.estimate(replace(plain, batch=2**20, seq=2**15), "cuda").total
    every.append(value_at_least("total of a step that no host has the memory for", huge, 8 * 2**35))
    numbered = same(f"the estimate on CUDA, asked again for number {number}", first, again)
    return [*every, *beside, less, in_all, *_kept_scores(trial, plain), least, *rounded, *numbered, *_of_unlike_cards(trial)]


def _counted_by(trial: Trial) -> Iterator[Comparison]:
    """Triton's kernels are counted for a GPU where they are installed and torch is not chosen, whether a card is here or not. They are used
    if one is here; if not, a reason is said where a GPU would have been given them, and nowhere else."""
    for kind, choice, triton, card in product(("cuda", "cpu"), ("auto", "torch"), (True, False), (True, False)):
        expected = "triton" if kind == "cuda" and choice == "auto" and triton else "torch"
        label = f"counted on {kind} by {choice}, Triton {triton}, a card {card}"
        counted, said = trial.memory.counted_by(kind, choice, triton, card)
        yield from same(label, expected, counted)
        reason = "torch (Triton kernels need a CUDA device" if triton else "torch (Triton cannot be imported"
        words = ("Triton for " if card else reason) if expected == "triton" else reason if (kind, choice) == ("cuda", "auto") else "torch"
        yield from same(f"{label}: said", words, said if words == "torch" else said[: len(words)])


def _of_unlike_cards(trial: Trial) -> list[Comparison]:
    """cuBLAS takes by default 32 MiB a stream on Hopper and later and about 8 before it; a card that is not here counts as the former."""
    capabilities = [8, 9, 7, 10]
    taken = {kind: trial.memory.workspaces(kind, capabilities) for kind in ("cuda", *(f"cuda:{index}" for index in range(5)), "cpu")}
    expected = {"cuda": False, **{f"cuda:{index}": major >= 9 for index, major in enumerate([*capabilities, 9])}, "cpu": False}
    found = same("devices that have the workspaces of an H100", expected, {kind: size >= 2 * WORKSPACE for kind, size in taken.items()})
    return found + same("devices that have none", ["cpu"], [kind for kind, size in taken.items() if not size])


def _kept_scores(trial: Trial, work: Workload) -> Iterator[Comparison]:
    """Attention in float32 is not fused on CUDA, so that the backward pass keeps the probabilities of each layer: 4 bytes · seq² a head. In
    it softmax has as many beside them three times: the gradient from above, its product with them, and the result."""
    sizes = [replace(work, dtype="float32", seq=seq) for seq in (256, 512)]
    short, long = (trial.memory.estimate(each, "cuda").parts.get("activations", 0) for each in sizes)
    scores = 4 * work.layers * work.heads * work.batch * (512**2 - 2 * 256**2)
    yield value_at_least("float32 on CUDA: activations of twice the tokens beyond twice those", long - 2 * short, 0.99 * scores)
    one = trial.memory.estimate(replace(sizes[1], layers=1), "cuda")
    peak = one.total - one.parts.get("library_workspace", 0)
    least = 4 * 4 * work.heads * work.batch * 512**2
    yield value_inside("float32 on CUDA: total in softmax's backward pass", peak, least, np.inf)


def _every_part(trial: Trial, work: Workload, found: Estimate) -> list[Comparison]:
    rounding = ROUNDED * (work.layers * 50 + 20) if trial.on_gpu else 0
    expected = _weights_and_moments(work)
    parts = {name: float(count) for name, count in found.parts.items()}
    compared = [value_inside(name, parts.get(name, np.nan), count, count + rounding) for name, count in expected.items()]
    compared += [value_at_least(name, parts.get(name, 0.0), 1.0) for name in TRANSIENT]
    if work.nf4:
        largest = max(count for name, count in counts(work).items() if name.endswith(("q_proj.weight", "v_proj.weight")))
        compared.append(value_at_least("dequantised_weights", parts.get("dequantised_weights", 0.0), BYTES[work.dtype] * largest))
    resident = sum(expected.values()) + parts.get("activations", 0.0)
    return [*compared, value_at_least("total over its parts", found.total, resident - rounding)]


def _weights_and_moments(work: Workload) -> dict[str, int]:
    """Bytes of weights and moments, from the sizes of the architecture alone."""
    base, trained = split(work, counts(work))
    width, projections = BYTES[work.dtype], [count for name, count in base.items() if name.endswith("_proj.weight")]

    def of(pattern: str) -> int:
        return sum(count for name, count in {**base, **trained}.items() if fnmatchcase(name, pattern))

    found = {"embedding": width * of("*.embed_tokens.weight"), "norms": width * of("*norm.weight")}
    if work.family == "qwen2":
        found["biases"] = width * of("*_proj.bias")
    if work.nf4:
        found["nf4_codes"] = sum((count + 1) // 2 for count in projections)
        found["nf4_absmax"] = sum(scale_bytes(count, work.double_quantize) for count in projections)
    else:
        found["projections"] = width * sum(projections)
    return found | {"lora": 4 * of("*.lora_?.weight"), "head": 4 * of("score.*"), "moments": 2 * 4 * sum(trained.values())}


def estimate_equals_measure(trial: Trial) -> Iterator[Comparison]:
    """The estimate's total, and what it says that autograd saves, against the device's allocator and autograd's hooks in real steps; on
    a GPU by each backend, of which the hand-written one has no hooks."""
    rng = trial.rng("measure")
    nf4, double = bool(rng.integers(2)), bool(rng.integers(2))
    work = replace(small(rng, trial.seed, nf4, nf4 and double), batch=12, seq=24, accumulation=int(rng.integers(1, 3)))
    if trial.on_gpu:  # so much larger than the workspaces of libraries that these do not matter
        work = replace(work, batch=32, seq=256, hidden=512, intermediate=1536, head_dim=512 // work.heads, layers=8)
    factor = 1.0 + float(trial.literal(np.ones(1)).max)
    for backend in trial.trainer.backends:
        asked = replace(work, backend=backend, double_quantize=work.double_quantize and backend == "torch")
        estimate, usage = trial.memory.estimate(asked), trial.memory.measure(asked, STEPS_AT_THE_PEAK[backend])
        yield value_within_factor(f"{backend}: total", estimate.total / usage.peak, factor)
        if backend == "torch":
            kept = estimate.parts.get("activations", 0) + estimate.parts.get("dequantised_weights", 0)
            yield value_within_factor("saved for backward", kept / trial.memory.saved(asked), factor)


def estimate_follows_every_setting(trial: Trial) -> Iterator[Comparison]:
    """Steps of a few micro-batches and of more than are held side by side, in any dtype and quantisation, where a CPU's allocator counts
    every byte: the total against the measure, and the parts of gradients against their count and size. On a card, which need not be here,
    what a layer keeps for its backward pass is held to the formulas of its operations."""
    rng, width = trial.rng("settings"), float(trial.literal(np.ones(1)).max)
    few, many = int(rng.integers(2, HELD + 1)), int(rng.integers(HELD + 1, 10))
    for accumulation, dtype, layers in (few, "float32", 1), (many, "bfloat16", 1), (1, "float32", 1), (1, "float32", DEEP):
        nf4, double = bool(rng.integers(2)), bool(rng.integers(2))
        work = replace(small(rng, trial.seed, nf4, nf4 and double), targets="all", rank=int(rng.choice([8, 24])), accumulation=accumulation)
        work = replace(work, layers=layers, batch=int(rng.integers(1, 4)), seq=int(rng.integers(4, 17)), dtype=dtype)
        if layers == DEEP:
            work = replace(work, batch=1, seq=4, rank=1, targets="q_v", nf4=True, double_quantize=False)
        elif accumulation == 1:  # what attention keeps weighs more than weights
            work = replace(work, batch=8, seq=512)
        estimate, measured = trial.memory.estimate(work), trial.memory.measure(work, 1).peak
        gradient = 4 * sum(split(work, counts(work))[1].values())
        name = f"{accumulation} micro-batches, {layers} layers"
        yield value_within(f"{name}: total / measured", estimate.total / measured, 1 - width, 1 + width)
        held = min(accumulation, HELD)
        yield value_inside(f"{name}: gradients", estimate.parts.get("gradients", 0), held * gradient, (held + 0.5) * gradient)
        if accumulation > HELD:  # they are averaged on the way, which takes a copy of each
            yield value_at_least(f"{name}: working", estimate.parts.get("working", 0), HELD * gradient)
    for backend in ("torch", "fused"):
        totals = trial.memory.totals_by_surroundings(replace(small(rng, trial.seed, nf4=False), backend=backend))
        yield from same(f"{backend}: totals where torch is set otherwise", dict.fromkeys(totals, totals["alone"]), totals)
    yield from kept_by_a_layer(trial, replace(small(rng, trial.seed, nf4=False), targets=str(rng.choice(["q_v", "all"]))))
    yield from _of_many_micro_batches(trial)
    yield from _of_last_micro_batches(trial)


def _of_many_micro_batches(trial: Trial) -> Iterator[Comparison]:
    """Tokens, mask and labels of all micro-batches of a step are on the device at once, however many they are: their part of the estimate
    is that of one so many times, and the total grows by as much. One layer's tokens are so many that a step takes more than loading."""
    work = replace(small(trial.rng("many micro-batches"), trial.seed, nf4=False), layers=1, batch=8, seq=64)
    several = bool(trial.seed % 2)
    one = trial.memory.estimate(work, "cpu", multi_label=several).parts.get("batch", 0)
    yield value_at_least("batch of one micro-batch", one, work.batch * work.seq)
    for backend in ("torch", "fused"):
        asked = [replace(work, backend=backend, accumulation=count) for count in MANY]
        estimates = [trial.memory.estimate(each, "cpu", multi_label=several) for each in asked]
        for count, found in zip(MANY, estimates, strict=True):
            # By hand there are a card's blocks, and one micro-batch packed may be beside them.
            most = count * one + (2 * one + 9 * ROUNDED if backend == "fused" else 0)
            yield value_inside(f"{backend}: batch of {count} micro-batches", found.parts.get("batch", 0), count * one, most)
        few, many = (found.total for found in estimates)
        yield value_at_least(f"{backend}: total of {MANY[1]} micro-batches above that of {MANY[0]}", many - few, (MANY[1] - MANY[0]) * one)


def _of_last_micro_batches(trial: Trial) -> list[Comparison]:
    """A run on fewer samples than a step has room for: a micro-batch that is not full counts as a full one does, and more than none.
    Several labels a sample take more than one. So it is by the hand-written layers, which a GPU runs where nothing else is said."""
    settings = {"num_classes": 2, "batch_size": 4, "accumulation_steps": 3, "quantize_nf4": False, "backend": "torch"}
    full, part = ([trial.memory.of_a_run(count, settings) for count in counts] for counts in ((2, 4, 8, 12), (5, 13)))
    narrow, longer = trial.memory.of_a_run(4, {**settings, "dtype": "bfloat16"}), trial.memory.of_a_run(4, settings, 16)
    classes = 4000
    one, several = (trial.memory.of_a_run(4, {**settings, "num_classes": classes, "multi_label": each}) for each in (False, True))
    texts = {"cuda": ([8, 8], [256]), "cuda:2": ([256, 8], [8])}
    validating, training = (trial.reservations.reserved_by(*lengths, settings, kind) for kind, lengths in texts.items())
    cut = trial.reservations.reserved_by([256, 8], [8], settings, "cuda", 1000)
    alone, whole, shared = (trial.reservations.reserved_by_one_of(*each) for each in ((1, 1), (1, 4), (4, 4)))
    short, full_step = (trial.reservations.reserved_by(lengths, [8], settings, "cuda") for lengths in ([8, 8], [256] * 12))
    return [
        value_at_least("more for several labels a sample, of which each has four bytes", several - one, 4 * 4 * (classes - 2)),
        value_within("reserved for a text of 256 tokens to validate on, or to train on", validating / training, 0.99, 1.01),
        *same("reserved for a text that was cut", training, cut),
        *same(
            "reserved for texts of 8 tokens, of 256, and for more of these, in their order",
            sorted({short, training, full_step}),
            [short, training, full_step],
        ),
        value_at_least(
            "reserved for a text of 256 tokens beyond one of 8, which attention keeps the probabilities of", training - short, 4 * 256**2
        ),
        *same("estimates of 8 and 12 samples, and of 5 and 13", full[2:], part),
        value_inside("reserved for a micro-batch beyond what one of four workers reserves", alone - shared, -np.inf, 0),
        value_inside("what one of four workers reserves beyond one that is alone", shared - whole, -np.inf, 0),
        *same("what a run does with memory", ["reserved", "loaded", "run", "given back"], trial.reservations.held_in_a_run()),
        *same("estimates of 2, 4 and 8 samples in their order", sorted(set(full[:3])), full[:3]),
        *same("whether texts of 16 tokens take more than of 8", True, longer > full[1]),
        *same("whether float32 takes more than bfloat16 by a fifth", True, full[1] > 1.2 * narrow),
        *_of_a_run_on_a_card(trial, {**settings, "backend": "auto"}),
    ]


def _of_a_run_on_a_card(trial: Trial, settings: Mapping[str, Any]) -> Iterator[Comparison]:
    """A card for which Triton is installed runs the hand-written layers, whose gradients of micro-batches take a place more."""
    trial.memory.require_kernels()
    one, three = (trial.memory.of_a_run(samples, settings, kind="cuda:1") for samples in (4, 12))
    plain = trial.memory.of_a_run(4, {**settings, "backend": "torch"}, kind="cuda")
    for backend in ("auto", "torch"):
        old, new = (
            trial.memory.of_a_run(4, {**settings, "backend": backend}, kind=kind, capabilities=(8, 9)) for kind in ("cuda", "cuda:1")
        )
        yield value_at_least(f"{backend}: more on the card that has the workspaces of an H100", new - old, WORKSPACE)
    yield from same("whether the layers take another cuBLAS workspace than differentiation", True, one - plain > WORKSPACE // 2)
    wide = {**settings, "num_classes": 4000}
    labels, several = (trial.memory.of_a_run(4, {**wide, "multi_label": each}, kind="cuda") for each in (False, True))
    yield value_at_least("by hand: more for several labels a sample", several - labels, 4 * 4 * (4000 - 2))
    yield value_at_least("by hand: more for three micro-batches than for one", three - one, 1)
    work = replace(small(trial.rng("by hand"), trial.seed, nf4=bool(trial.seed % 2)), backend="fused")
    parts, rounding, trained = (
        trial.memory.estimate(work, "cuda").parts,
        ROUNDED * (work.layers * 50 + 20),
        sum(split(work, counts(work))[1].values()),
    )
    yield from same("by hand: parts on CUDA that are no blocks", [], [name for name, count in parts.items() if count % ROUNDED])
    for name, count in _weights_and_moments(work).items():
        if name not in ("lora", "head"):  # which have one vector of all
            yield value_inside(f"by hand: {name}", float(parts.get(name, np.nan)), count, count + rounding)
    for name in ("lora", "gradients"):
        yield value_at_least(
            f"by hand: {name}, in float32 and in the dtype of products", parts.get(name, 0), (4 + BYTES[work.dtype]) * trained
        )
    quantised, pair = trial.memory.estimate(replace(work, nf4=True), "cuda").parts, 2 * work.intermediate * work.hidden
    yield value_at_least("by hand: dequantised_weights", quantised.get("dequantised_weights", 0), BYTES[work.dtype] * pair)
    yield from _of_many_layers(trial, replace(work, layers=DEEP, hidden=512, intermediate=1536, batch=1, dtype="bfloat16", nf4=True))


def _of_many_layers(trial: Trial, work: Workload) -> Iterator[Comparison]:
    """The estimate of a deep model on a card is at least what stays and what is kept for the backward pass, and at most the sum of all
    parts. A deep model's peak is in a step; with few layers quantising takes more."""
    for backend in LIMITS:
        found = trial.memory.estimate(replace(work, backend=backend), "cuda")
        together = found.resident + found.parts.get("activations", 0) + found.parts.get("library_workspace", 0)
        yield value_inside(f"{backend}: total of {work.layers} layers", found.total, together, sum(found.parts.values()))


def quantised_one_at_a_time(trial: Trial) -> Iterator[Comparison]:
    """Loading sharded weights with NF4 allocates on the host only a few of the largest tensors beyond what stays; every absmax is right.

    So does a pipeline that is opened on them, or on its adapter, and writing them as an .apr file; and so do merging an update into them
    and saving them as another folder, beyond the weights that are written. A large weight is looked at a part at a time, and what that
    takes is given back.
    """
    rng = trial.rng("shards")
    hidden, intermediate = 64 * int(rng.integers(1, 3)), 64 * int(rng.integers(2, 4))
    work = replace(SMALL, vocab=16, hidden=hidden, intermediate=intermediate, layers=10, head_dim=hidden // 4)
    tensors, _ = split(work, drawn(rng, work))
    with tempfile.TemporaryDirectory() as folder:
        _write_shards(Path(folder), tensors, work, shards=int(rng.integers(2, 4)))
        loaded = trial.memory.load_nf4(Path(folder))
        words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
        (Path(folder) / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
        written, opened = trial.memory.written(Path(folder)), trial.memory.opened(Path(folder))
    projections = {name.removesuffix(".weight"): value for name, value in tensors.items() if name.endswith("_proj.weight")}
    absmax = {name: np.abs(value.reshape(-1, BLOCK)).max(axis=1) for name, value in projections.items()}
    yield from same("absmax", absmax, loaded.absmax)
    # One weight, and what quantising it takes: scaled copies in float32 and its codes in int64 before they are packed.
    largest = max(weight.nbytes for weight in projections.values())
    yield value_at_most("beyond what stays, in largest projections", max(0, loaded.peak - loaded.resident) / largest, 6)
    for name, beyond in opened.items():
        yield value_at_most(f"beyond what stays of a {name} pipeline, in largest projections", beyond / largest, 6)
    yield _read_once(trial)
    for name in ("merged", "saved"):
        beyond = written[name] - sum(value.nbytes for value in tensors.values())
        yield value_at_most(f"beyond what is {name}, in largest projections", max(0, beyond) / largest, 6)
    yield value_at_most("where a file is written, in largest projections", written["exported"] / largest, 6)
    small, large = map(trial.memory.looked_at, LOOKED_AT)
    for name, (peak, left) in large.items():
        yield value_at_most(f"{name} of a weight twice as large: what it takes more, in MB", (peak - small[name][0]) / MEGABYTE, 16)
        yield value_at_most(f"{name} of a large weight: what it leaves, in MB", max(left, small[name][1]) / MEGABYTE, LEFT)


def _read_once(trial: Trial) -> Comparison:
    """A tensor is read into its own memory, and nowhere else before."""
    work = replace(SMALL, vocab=2**17)
    tensors, _ = split(work, drawn(trial.rng("large embedding"), work))
    with tempfile.TemporaryDirectory() as folder:
        _write_shards(Path(folder), tensors, work, shards=1)
        held, size = trial.memory.read(Path(folder))
    return value_at_most("held beside a tensor while it is read, in its bytes", held / size - 1, 0.25)


def _write_shards(folder: Path, tensors: Mapping[str, Array], work: Workload, shards: int) -> None:
    weight_map = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file({name: value for name, value in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": work.family, "vocab_size": work.vocab, "num_hidden_layers": work.layers, "head_dim": work.head_dim}
    config |= {"hidden_size": work.hidden, "intermediate_size": work.intermediate, "num_attention_heads": work.heads}
    config |= {"num_key_value_heads": work.kv_heads, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": work.theta}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64, "hidden_act": "silu"}))


def published_layer_is_small(trial: Trial, *, model: str, most: float) -> list[Comparison]:
    """One layer of a published shape with NF4 keeps at most so many MB, and at least its codes.

    The embedding is of a few words, and the adapter of rank 1: beside the layer they are next to nothing.
    """
    work = Workload(**{**SHAPES[model], "layers": 1, "vocab": 16}, **{**RUN, "rank": 1}, batch=1, seq=1, seed=trial.seed % 2**31)
    codes = sum(count for name, count in counts(work).items() if name.endswith("_proj.weight")) / 2
    return [value_inside("MB held", trial.memory.held(work) / MEGABYTE, codes / MEGABYTE, most)]


def steps_keep_nothing(trial: Trial) -> list[Comparison]:
    """Steps on batches of a few lengths, each seen several times before, leave no byte and no tensor more, and take no more at the peak.

    The classifier is small, its micro-batches do not divide the batch, and the lengths are of three classes of what is packed. Of many
    lengths, each seen once, a third as many tensors stay at most: what is kept for a length is let go some time.
    """
    rng, device = trial.rng("leak"), "cuda" if trial.on_gpu else "cpu"
    seq, warm_up, steps = 200, 4 * LENGTHS, STEPS[device]
    lengths = [int(rng.integers(seq * part // LENGTHS, seq * (part + 1) // LENGTHS)) + 1 for part in range(LENGTHS)]
    family, layers = str(rng.choice(FAMILIES)), int(rng.integers(1, 3))
    work = replace(SMALL, family=family, intermediate=96, layers=layers, classes=3, rank=2, alpha=4.0, dtype="float32")
    work = replace(work, targets=str(rng.choice(["q_v", "all"])), nf4=bool(rng.integers(2)))
    work = replace(work, batch=5, seq=seq, micro=int(rng.choice([2, 5])), seed=trial.seed % 2**31)
    found = []
    for backend in trial.memory.backends:
        grown = trial.memory.grown(replace(work, backend=backend), lengths, warm_up, steps)
        found += same(backend, Growth(steps + warm_up, dict.fromkeys(MEASURES[device], 0)), grown)
    many = [int(each) for each in rng.permutation(np.arange(seq, 2 * seq))[: 2 * EVER_NEW]]
    kept = trial.memory.kept_by_lengths(replace(work, batch=1, seq=2 * seq, micro=1), many)
    return [*found, value_at_most(f"tensors more after {EVER_NEW} lengths more", kept, EVER_NEW // 3)]


def step_stays_below(trial: Trial) -> Iterator[Comparison]:
    """Loading a model with NF4 and training it, by each backend, stays below a peak and leaves a few bits of a projection's weight.

    On a GPU both are measured. Elsewhere they are estimated for one, what stays is measured of a small model too, also doubly quantised,
    and estimated of plain weights by hand-written layers; the estimate of these has what several micro-batches take.
    """
    trial.memory.require_kernels()
    for backend, limit in LIMITS.items():
        work = replace(LARGE, backend=backend, seed=trial.seed % 2**31)
        taken = trial.memory.measure(work) if trial.on_gpu else trial.memory.estimate(work, "cuda")
        peak = taken.total if isinstance(taken, Estimate) else taken.peak
        yield value_at_most(f"{backend}: GiB at the peak", peak / GIB, limit)
        yield from stays(work, taken, "cuda")
    if not trial.on_gpu:
        rng = trial.rng("family")
        work = replace(SMALL, family=str(rng.choice(FAMILIES)), seed=trial.seed % 2**31)
        for each in (work, replace(work, intermediate=512, double_quantize=True)):
            yield from stays(each, trial.memory.measure(each), "cpu")
        plain = replace(LARGE, layers=2, backend="fused", nf4=False)
        yield from stays(plain, trial.memory.estimate(plain, "cuda"), "cuda")
        yield from _kept_by_layers(trial, replace(work, backend="fused", accumulation=int(rng.integers(2, 10)), batch=8, seq=64))
        for batch, seq in ((1, 40), (3, 300), (9, 256), (int(rng.integers(2, 70)), int(rng.integers(2, 700)))):
            counted, packed = trial.memory.tokens_of_a_step(replace(work, batch=batch, seq=seq))
            yield from same(f"tokens of {batch} samples of {seq} in an estimate", packed, counted)


def _kept_by_layers(trial: Trial, work: Workload) -> list[Comparison]:
    """An estimate of the hand-written layers has what a block keeps of each token: its input, queries, keys, values, what attention gives,
    the sum after it, gate and up; and in a step of several micro-batches their gradients side by side, with the place of the next. As many
    tokens in short texts take as much, for they are packed."""
    whole = trial.memory.estimate(work)
    part, alone = whole.parts, trial.memory.estimate(replace(work, accumulation=1)).total
    begun, grain = (trial.memory.estimate(replace(work, batch=batch)).parts.get("activations", 0) for batch in (5, 8))  # of 64 tokens each
    short = trial.memory.estimate(replace(work, batch=work.batch * SHORTER, seq=work.seq // SHORTER)).parts
    queries, keys = work.heads * work.head_dim, work.kv_heads * work.head_dim
    kept = BYTES[work.dtype] * (2 * work.hidden + 2 * queries + 2 * keys + 2 * work.intermediate)
    tokens, gradient = work.layers * work.batch * work.seq, 4 * sum(split(work, counts(work))[1].values())
    name = f"fused, {work.accumulation} micro-batches"
    return [
        value_at_least(f"{name}: library_workspace", part.get("library_workspace", 0), FUSED_STREAMS * WORKSPACE),
        value_at_least(f"{name}: activations", part.get("activations", 0), tokens * kept),
        value_within(f"{name}: activations of a grain that is begun / of a whole one", begun / max(1, grain), 0.9, 1.1),
        value_at_most(
            f"{name}: activations of as many tokens in short texts", short.get("activations", 0), 1.1 * part.get("activations", 0)
        ),
        value_at_least(f"{name}: gradients", part.get("gradients", 0), (min(work.accumulation, HELD) + 1) * gradient),
        value_at_least(f"{name}: total above that of one", whole.total - alone, (min(work.accumulation, HELD) - 1) * gradient),
    ]


def most_held(ask: Callable[[], object]) -> int:
    """The most bytes that Python and NumPy hold at any time of that call."""
    tracemalloc.start()
    try:
        ask()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
