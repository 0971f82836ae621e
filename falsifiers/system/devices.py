"""Devices, memory and non-finite values: what a run may take for granted of where it runs."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.refusals import refusal
from blackswan.falsifiers.numeric.comparison import (
    Comparison,
    broken,
    compare_exactly,
    value_at_least,
    value_at_most,
    value_inside,
    value_within_factor,
)
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.system.engines import engines
from blackswan.reference.table import Array

LARGEST_INDEX = 15
BLOCK = 64
SEVEN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
TARGETS = {"q_v": SEVEN[0:3:2], "all": SEVEN}
GIB = 2**30
STORAGE = {"float32": 4, "bfloat16": 2}


def auto_alone_falls_back(attack: Attack, case: Case) -> list[Comparison]:
    """Every name of the grammar on hosts with none to three cards: the device, or a refusal, and how many warnings."""
    found = []
    for cards in range(4):
        for name in ("cpu", "auto", "cuda", *(f"cuda:{index}" for index in (0, 1, 2, LARGEST_INDEX))):
            label = f"{name} with {cards} cards"
            index = int(name.partition(":")[2] or 0)
            scalars = {"name": name, "cards": cards}
            if name.startswith("cuda") and index >= cards:
                found.append(_named(label, refusal(lambda s=scalars: attack.answer(case, scalars=s), "DeviceUnavailable", name)))  # type: ignore[misc]  # bound
                continue
            kind = "cpu" if name == "cpu" or (name == "auto" and not cards) else "cuda"
            answer = attack.answer(case, scalars=scalars)
            if _text(answer["kind"]) != kind:
                found.append(broken(label, "another kind of device", kind, _text(answer["kind"])))
            found.append(_equal(f"index of {label}", index, answer["index"]))
            found.append(_equal(f"warnings for {label}", int(name == "auto" and not cards), answer["warnings"]))
    return found


def stray_tensor_is_named(attack: Attack, case: Case) -> list[Comparison]:
    """No objection to a model in its place; a parameter, a buffer or a tensor of the optimiser elsewhere is refused by its name."""
    rng = generator_for(case.seed, "stray tensor")
    scalars = _model(rng, case.seed, nf4=True)
    layer = f"model.layers.{rng.integers(scalars['layers'])}"
    astray = [
        f"{layer}.{SEVEN[1 + 2 * int(rng.integers(3))]}.quantized.{rng.choice(['codes', 'absmax'])}",
        f"{layer}.self_attn.{rng.choice(['q', 'v'])}_proj.lora_{rng.choice(['A', 'B'])}.weight",
        f"{layer}.{rng.choice(['input', 'post_attention'])}_layernorm.weight",
        str(rng.choice(["model.embed_tokens.weight", "model.norm.weight"])),
        str(rng.choice(["score.weight", "score.bias"])),
        "optimiser.exp_avg",
        "optimiser.exp_avg_sq",
    ]
    try:
        found = [_equal("no objection", 1, attack.answer(case, scalars=scalars | {"astray": ""})["resident"])]
    except SubjectError as error:
        return [broken("no objection", str(error))]
    for name in astray:
        asked = scalars | {"astray": name}
        found.append(_named(name, refusal(lambda s=asked: attack.answer(case, scalars=s), "NotResident", f"^{re.escape(name)} is on")))  # type: ignore[misc]  # bound
    return found


def ledger_keeps_account(attack: Attack, case: Case) -> list[Comparison]:
    """A random sequence of reservations of two cards against an account of its own: what is refused, and what is reserved after each."""
    rng = generator_for(case.seed, "reservations")
    cards = [_card(rng), _card(rng)]
    held: dict[int, tuple[int, int]] = {}  # which reservation: its card and bytes
    sequence, refused, reserved = [], [], []
    for which in range(20):
        verb = str(rng.choice(["acquire", "update", "update", "release"])) if held else "acquire"
        chosen = which if verb == "acquire" else int(rng.choice(list(held)))
        card, before = held.get(chosen, (int(rng.integers(2)), 0))
        others = sum(count for at, count in held.values() if at == card) - before
        limit = _most(cards[card], before, others)
        # Most of what goes wrong by a byte goes wrong at the limit.
        count = int(rng.choice([limit, limit + 1, int(rng.integers(1, cards[card]["total"] * 3 // 4))]))
        fits = verb == "release" or count <= max(before, limit)
        if verb == "release":
            del held[chosen]
        elif fits:
            held[chosen] = (card, count)
        sequence.append([verb, chosen, count, card])
        refused.append(not fits)
        reserved.append([sum(count for at, count in held.values() if at == each) for each in (0, 1)])
    with tempfile.TemporaryDirectory() as folder:
        answer = attack.answer(case, scalars={"folder": folder, "cards": cards, "sequence": sequence})
    expected = {"refused": np.asarray(refused), "reserved": np.asarray(reserved)}
    return [compare_exactly(name, value, answer[name]) for name, value in expected.items()]


def _card(rng: Generator) -> dict[str, int]:
    """Bytes in all, free, and those that this process has allocated, of what is not free."""
    total = int(rng.integers(50, 200)) * GIB + int(rng.integers(GIB))
    free = total if rng.random() < 0.5 else int(rng.integers(total // 4, total // 2))
    return {"total": total, "free": free, "own": int(rng.integers(total - free + 1))}


def _most(card: Mapping[str, int], before: int, others: int) -> int:
    """The most bytes of a reservation that has `before` now, where `others` are reserved beside it."""
    return min(card["free"] + min(card["own"], before), card["total"] - others)


def race_stays_within_capacity(attack: Attack, case: Case) -> list[Comparison]:
    """Processes that reserve at once never hold more than the device has; each ends, some of them got memory, and nothing is left."""
    rng = generator_for(case.seed, "race")
    fitting, processes = int(rng.integers(1, 3)), 6
    with tempfile.TemporaryDirectory() as folder:
        host = {"folder": folder, "free": fitting * GIB + GIB // 2, "total": fitting * GIB + GIB // 2}
        answer = attack.answer(case, scalars=host | {"processes": processes, "rounds": 5, "bytes": GIB})
    return [
        value_inside("held together", float(answer["peak"]) / GIB, 0, fitting),
        _equal("processes that ended", processes, answer["finished"]),
        value_at_least("reservations", float(answer["gained"]), fitting),
        _equal("left over", 0, answer["left"]),
    ]


def the_dead_hold_nothing(attack: Attack, case: Case) -> list[Comparison]:
    """A killed holder's memory is free at once, and an earlier process of the same id holds none; a living one keeps its own."""
    rng = generator_for(case.seed, "holder")
    count = int(rng.integers(1, 10)) * GIB
    with tempfile.TemporaryDirectory() as folder:
        answer = attack.answer(case, scalars={"folder": folder, "free": 20 * GIB, "total": 20 * GIB, "bytes": count})
    expected = {"during": count, "after_kill": 0, "reused": 0}
    return [_equal(name, value, answer[name]) for name, value in expected.items()]


def too_little_memory_is_refused(attack: Attack, case: Case) -> list[Comparison]:
    """More than is free, or than others leave: refused with what is needed, available, free and in all, and the block is not entered."""
    rng = generator_for(case.seed, "too little")
    total = int(rng.integers(40, 200))
    free = int(rng.integers(5, total))
    found = []
    for needed, fits in ((free + int(rng.integers(1, 300)), False), (free, True)):
        with tempfile.TemporaryDirectory() as folder:
            allocated = Path(folder) / "allocated"
            host = {"folder": str(Path(folder) / "ledger"), "free": free * GIB, "total": total * GIB}
            scalars = host | {"needed": needed * GIB, "allocated": str(allocated)}
            if fits:
                found.append(_equal("what is free is given", 1, attack.answer(case, scalars=scalars)["accepted"]))
                continue
            numbers = rf"{needed}\.00 GiB needed.*{free}\.00 GiB available.*{free}\.00 GiB of {total}\.00 GiB.*free"
            found.append(refusal(lambda s=scalars: attack.answer(case, scalars=s), "InsufficientMemory", numbers))  # type: ignore[misc]  # bound
            if allocated.exists():
                found.append(broken("refusal", "the memory was taken before it was refused"))
    return found


def estimate_counts_every_part(attack: Attack, case: Case) -> list[Comparison]:
    """Parts of the estimate against a count of the architecture's bytes; each is there where the run has it."""
    rng = generator_for(case.seed, "parts")
    scalars = _model(rng, case.seed, nf4=bool(rng.integers(2)))
    answer = attack.answer(case, scalars=scalars)
    rounding = 512 * (scalars["layers"] * 30 + 20) if attack.subject.device.startswith("cuda") else 0
    found = []
    for name, count in _bytes(scalars).items():
        if f"parts/{name}" not in answer:
            found.append(broken(name, "not in the estimate", float(count)))
        else:
            found.append(_near(name, float(answer[f"parts/{name}"]), count, rounding))
    transient = ("activations", "gradients", "update", "batch", "working", "logits")
    found += [broken(name, "not in the estimate") for name in transient if not answer.get(f"parts/{name}", np.asarray(0))]
    if scalars["nf4"]:
        shapes = _projections(scalars)
        largest = STORAGE[scalars["dtype"]] * max(int(np.prod(shapes[name])) for name in TARGETS[scalars["targets"]])
        dequantised = float(answer.get("parts/dequantised_weights", np.asarray(0)))
        found.append(value_at_least("dequantised_weights", dequantised, float(largest)))
    resident = sum(_bytes(scalars).values()) + float(answer.get("parts/activations", np.asarray(0)))
    found.append(value_at_least("total over its parts", float(answer["total"]), resident - rounding))
    return found


def _near(name: str, value: float, count: float, rounding: float) -> Comparison:
    """Equal on the CPU; on a device that rounds its allocations up, above by no more than that."""
    if not rounding:
        return compare_exactly(name, np.asarray(count), np.asarray(value))
    return value_inside(name, value, count, count + rounding)


def _bytes(scalars: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of weights and moments, from the sizes of the architecture alone."""
    storage = STORAGE[scalars["dtype"]]
    shapes = _projections(scalars)
    hidden, layers, rank = scalars["hidden"], scalars["layers"], scalars["rank"]
    trained = [rank * sum(shapes[name]) for name in TARGETS[scalars["targets"]]]
    lora, head = layers * sum(trained), scalars["classes"] * (hidden + 1)
    norms = layers * (2 * hidden + (2 * scalars["head_dim"] if scalars["family"] == "qwen3" else 0)) + hidden
    found = {"embedding": storage * scalars["vocab"] * hidden, "norms": storage * norms}
    if scalars["family"] == "qwen2":
        found["biases"] = storage * layers * sum(shapes[name][0] for name in SEVEN[:3])
    counts = [rows * columns for rows, columns in shapes.values()]
    if scalars["nf4"]:
        found["nf4_codes"] = layers * sum((count + 1) // 2 for count in counts)
        found["nf4_absmax"] = 4 * layers * sum(-(-count // BLOCK) for count in counts)
    else:
        found["projections"] = storage * layers * sum(counts)
    return found | {"lora": 4 * lora, "head": 4 * head, "moments": 2 * 4 * (lora + head)}


def _projections(scalars: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    hidden, intermediate = scalars["hidden"], scalars["intermediate"]
    queries, keys = scalars["heads"] * scalars["head_dim"], scalars["kv_heads"] * scalars["head_dim"]
    shapes = [(queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries)]
    return dict(zip(SEVEN, [*shapes, (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)], strict=True))


def estimate_equals_measure(attack: Attack, case: Case) -> list[Comparison]:
    """The estimate's total, and what it says that autograd saves, against the device's allocator and autograd's hooks in a real step; on
    a GPU by each engine, of which the hand-written one has no hooks."""
    rng = generator_for(case.seed, "measure")
    scalars = _model(rng, case.seed, nf4=bool(rng.integers(2)))
    scalars |= {"batch": 12, "seq": 24, "accumulation": int(rng.integers(1, 3))}
    if attack.subject.device.startswith("cuda"):  # so much larger than the workspaces of libraries that these do not matter
        scalars |= {"batch": 32, "seq": 256, "hidden": 512, "intermediate": 1536, "head_dim": 512 // scalars["heads"], "layers": 8}
    factor, found = 1.0 + float(attack.tolerance.value or 0.0), []
    for engine in engines(attack):
        expected = attack.answer(case, operation="estimate_memory", scalars=scalars | {"engine": engine})
        measured = attack.answer(case, operation="measure_memory", scalars=scalars | {"engine": engine})
        found.append(value_within_factor(f"{engine}: total", float(expected["total"]) / float(measured["peak"]), factor))
        if engine == "torch":
            kept, dequantised = (float(expected.get(f"parts/{name}", np.asarray(0))) for name in ("activations", "dequantised_weights"))
            found.append(value_within_factor("saved for backward", (kept + dequantised) / float(measured["saved"]), factor))
    return found


def quantised_one_at_a_time(attack: Attack, case: Case) -> list[Comparison]:
    """Sharded weights loaded with NF4: what the host allocates beyond what stays, against the largest tensor; absmax of every block."""
    rng = generator_for(case.seed, "shards")
    layers, hidden, intermediate = 6, 64 * int(rng.integers(1, 3)), 64 * int(rng.integers(2, 4))
    sizes = {"hidden": hidden, "intermediate": intermediate, "heads": 4, "kv_heads": 2, "head_dim": hidden // 4}
    tensors = _weights(rng, sizes, layers)
    with tempfile.TemporaryDirectory() as folder:
        _write_shards(Path(folder), tensors, sizes, layers, shards=int(rng.integers(2, 4)))
        answer = attack.answer(case, scalars={"path": folder})
    projections = {name.removesuffix(".weight"): value for name, value in tensors.items() if name.removesuffix(".weight").endswith(SEVEN)}
    found = []
    for name, weight in projections.items():
        padded = np.pad(weight.reshape(-1), (0, -weight.size % BLOCK)).reshape(-1, BLOCK)
        if f"absmax/{name}" not in answer:
            found.append(broken(name, "not in NF4"))
        else:
            found.append(compare_exactly(name, np.abs(padded).max(axis=1), answer[f"absmax/{name}"]))
    # One weight, and what quantising it takes: scaled copies in float32 and its codes in int64 before they are packed.
    beyond = max(0.0, float(answer["peak"]) - float(answer["resident"] if attack.subject.device == "cpu" else 0))
    largest = max(weight.nbytes for weight in projections.values())
    found.append(value_at_most("beyond what stays, in largest projections", beyond / largest, 6))
    return found


def _weights(rng: Generator, sizes: Mapping[str, int], layers: int) -> dict[str, Array]:
    hidden = sizes["hidden"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (16, hidden), "model.norm.weight": (hidden,)}
    for layer in range(layers):
        path = f"model.layers.{layer}"
        shapes |= {f"{path}.{name}.weight": shape for name, shape in _projections(sizes).items()}
        shapes |= {f"{path}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _write_shards(folder: Path, tensors: Mapping[str, Array], sizes: Mapping[str, int], layers: int, shards: int) -> None:
    weight_map = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        save_file({name: value for name, value in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "llama", "vocab_size": 16, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config |= {"hidden_size": sizes["hidden"], "intermediate_size": sizes["intermediate"], "num_attention_heads": sizes["heads"]}
    config |= {"num_key_value_heads": sizes["kv_heads"], "head_dim": sizes["head_dim"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64, "hidden_act": "silu"}))


def origin_is_named(attack: Attack, case: Case) -> list[Comparison]:
    """A value planted in a parameter, in the output of a call or in the gradient that a call passes on: the text begins with its place.

    In the parameter it is the last number, and the parameter has several parts that are searched one after the other.
    """
    rng = generator_for(case.seed, "origin")
    scalars = _model(rng, case.seed, nf4=False) | {"part": int(generator_for(case.seed, "part").integers(5, 15))}
    found = []
    for planted, place in _plants(rng, scalars):
        answer = attack.answer(case, scalars=scalars | planted)
        label = f"{planted['where']} {planted['value']} at {place or 'no place'}"
        text = _text(answer["origin"])
        named = text.startswith(place) and (not place or text[len(place)] in ": ") if place else not text
        found.append(Comparison(label, True, 0.0, "text") if named else broken(label, "another origin", place or "none", text))
        found.append(_equal(f"changed by asking: {label}", 0, answer["changed"]))
    return found


def non_finite_stops_the_step(attack: Attack, case: Case) -> list[Comparison]:
    """A step with a value planted raises, and changes neither weights nor moments; without one it does both. Calls are those of automatic
    differentiation; a parameter is every engine's, and an infinite logit of a class that is no label leaves loss and gradient finite."""
    rng = generator_for(case.seed, "stop")
    scalars = _model(rng, case.seed, nf4=bool(rng.integers(2)))
    none, *others = _plants(rng, scalars)
    logit = none[0] | {"where": "parameter", "parameter": "score.bias", "value": -np.inf}, "a logit"
    found = []
    for engine in engines(attack):
        for planted, place in (none, logit, *others):
            if engine == "torch" or planted["where"] in ("", "parameter"):
                answer = attack.answer(case, scalars=scalars | planted | {"engine": engine})
                label = f"{engine}: {planted['where']} {planted['value']} at {place or 'no place'}"
                found.append(_equal(f"stopped, {label}", int(bool(place)), answer["stopped"]))
                found.append(_equal(f"changed, {label}", int(not place), answer["changed"]))
    return found


def _plants(rng: Generator, scalars: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Bad values, and the place that has to be named; and none, and no place."""
    layer, layers = int(rng.integers(1, scalars["layers"])), scalars["layers"]
    path = f"model.layers.{layer}"
    none = {"where": "", "operation": "", "nth": 0, "calls": 1, "parameter": "", "value": 0.0}
    yield none, ""
    name = f"{path}.{rng.choice(['input_layernorm', 'self_attn.q_proj.lora_B'])}.weight"
    yield none | {"where": "parameter", "parameter": name, "value": _bad(rng)}, f"parameter {name}"
    calls = {
        "swiglu": (layer, layers, f"{path}.mlp.swiglu"),
        "attention": (layer, layers, f"{path}.self_attn.attention"),
        "rms_norm": (2 * layer + 1, 2 * layers + 1, f"{path}.post_attention_layernorm"),
        "residual_add": (2 * layer, 2 * layers, f"{path}.attention_residual"),
    }
    for where in ("output", "gradient"):
        operation = str(rng.choice(list(calls)))
        nth, count, place = calls[operation]
        yield none | {"where": where, "operation": operation, "nth": nth, "calls": count, "value": _bad(rng)}, place


def _bad(rng: Generator) -> float:
    return float(rng.choice([np.nan, np.inf, -np.inf]))


def arrives_and_comes_back(attack: Attack, case: Case) -> list[Comparison]:
    """Every tensor put on the device is there bit for bit; after a step the trained ones come back the same from model and state."""
    rng = generator_for(case.seed, "sync")
    scalars = _model(rng, case.seed, nf4=False) | {"dtype": str(rng.choice(["float32", "bfloat16"]))}
    answer = attack.answer(case, scalars=scalars)
    return [*_same(answer, "sent", "held"), *_same(answer, "trained", "trainable")]


def _same(answer: Mapping[str, Array], left: str, right: str) -> list[Comparison]:
    sides = [{name.partition("/")[2]: value for name, value in answer.items() if name.startswith(f"{side}/")} for side in (left, right)]
    found = [broken(name, f"not in both, {left} and {right}") for name in sorted(sides[0].keys() ^ sides[1].keys())]
    return found + [compare_exactly(name, value, sides[1][name]) for name, value in sides[0].items() if name in sides[1]]


def _model(rng: Generator, seed: int, nf4: bool) -> dict[str, Any]:
    """A small classifier whose sizes are unlike each other, and a batch for it."""
    head_dim = int(rng.choice([8, 16]))
    return {
        "family": str(rng.choice(["llama", "qwen2", "qwen3"])),
        "vocab": 40,
        "hidden": 4 * head_dim,
        "intermediate": int(rng.choice([72, 96])),
        "layers": int(rng.integers(2, 4)),
        "heads": 4,
        "kv_heads": 2,
        "head_dim": head_dim,
        "classes": int(rng.integers(2, 5)),
        "rank": int(rng.integers(1, 5)),
        "targets": "q_v",
        "nf4": nf4,
        "dtype": "float32",
        "seed": int(seed) % 2**31,
        "batch": 4,
        "seq": 6,
        "accumulation": 1,
        "engine": "torch",
    }


def _equal(name: str, expected: int, actual: Array) -> Comparison:
    return compare_exactly(name, np.asarray(expected), np.asarray(actual))


def _text(value: Array) -> str:
    return value.astype(np.uint8).tobytes().decode()


def _named(name: str, comparison: Comparison) -> Comparison:
    return Comparison(**{**vars(comparison), "tensor": name})
