"""Saved adapters and merged models of which a key or a tensor is damaged."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import load, save

from blackswan.falsifiers.numeric.comparison import Comparison, value_at_least
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.system.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BESIDE,
    CONFIG,
    HEAD,
    PREFIX,
    TOKENIZER,
    WEIGHTS,
    Model,
    one_ulp_off,
)
from blackswan.falsifiers.system.checkpoint_parts import one_token_more
from blackswan.falsifiers.system.config_files import SCALED
from blackswan.falsifiers.system.derived_damage import (
    ABSENT,
    SETTINGS,
    TEXTS,
    UNREAD,
    Damage,
    another,
    edited,
    forms,
    judged,
    other_types,
    small_base,
    tensors,
)
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.trial import Trial

LARGE, HUGE = 20_000, 300_000
"""Classes, and a rank, by which tensors have more than a MiB where a hidden state has 16; and classes by which a head has more than 16."""
IRRELEVANT = ("auto_mapping", "inference_mode", "lora_dropout", "revision", "task_type", "base_model_name_or_path")
"""Keys of an adapter_config.json of which nothing is computed; the last one is looked at where no base is given."""


def _adapter_damage(folder: Path, rng: Generator) -> Iterator[Damage]:
    """Each key of PEFT's file, once removed and once of another type; of the others a damage may leave the adapter as it is."""
    needed = ("peft_type", "r", "lora_alpha", "target_modules", "modules_to_save")
    make = partial(edited, folder, ADAPTER_CONFIG)
    for key, value in json.loads((folder / ADAPTER_CONFIG).read_text()).items():
        yield make({key: ABSENT}, free=key not in needed)
        other = other_types(value)[int(rng.integers(len(other_types(value))))]
        yield make({key: other}, free=key in IRRELEVANT)
    yield from (make({"base_model_name_or_path": value}) for value in (ABSENT, None, "", 3, ["a"]))
    yield from (make({"use_something_new": value}) for value in (True, 1, "on", {"a": 1}, [0]))
    yield make({"use_something_new": False}, taken=True)


def _beside_damage(folder: Path, rng: Generator) -> Iterator[Damage]:
    """Each key of blackswan.json: removed, of another type, another value, unknown; edited so that its digest fits, or not.

    A merged model computes nothing of the updates that it says are in it, and a base's tensor without a checksum is not looked at.
    """
    merged = (folder / CONFIG).is_file()
    make, values = partial(edited, folder, BESIDE), json.loads((folder / BESIDE).read_text())
    for key, value in values.items():
        other = other_types(value)[int(rng.integers(len(other_types(value))))]
        updates = key == "lora"
        yield make({key: ABSENT}, BESIDE if updates else "")
        yield make({key: other})
        yield make({key: another(value)}, BESIDE)
        if key != "digest":
            yield make({key: ABSENT}, "rank" if updates else "", seal=True, free=updates and merged)
            yield make({key: other}, seal=True)
    yield from (make({"surplus": 1}, seal=seal) for seal in (False, True))
    yield from (make({"pooling": value}, seal=True) for value in ("max", "", "Mean"))
    for part in ("architecture", "lora"):
        for key, value in values.get(part, {}).items():
            unread = part == "lora" and merged
            yield make({f"{part}/{key}": another(value)}, key, seal=True, free=unread)
            yield make({f"{part}/{key}": ABSENT}, key, seal=True, free=unread or value is None)
    for group, file in (("tensors", "safetensors"), ("base", "")):
        kept = values["checksums"][group]
        name = str(rng.choice(sorted(kept.keys() - {UNREAD})))
        yield make({f"checksums/{group}/{name}": another(kept[name])}, f"{file}.*{name}", seal=True)
        yield make({f"checksums/{group}/{name}": ABSENT}, f"{file}.*{name}", seal=True, free=group == "base")
        yield make({f"checksums/{group}": [1]}, f"{BESIDE}.*checksums", seal=True)
    yield from (make({"extra/settings": value}, f"{BESIDE}.*settings", seal=True) for value in (["mean"], [], "", 0, False, None))
    yield make({"extra/settings/surplus": 1}, f"{BESIDE}.*surplus", seal=True)
    own = ("num_classes", "pooling", "quantize_nf4", "double_quantize", *(() if merged else ("lora_rank", "lora_alpha", "lora_targets")))
    for key in values["extra"]["settings"]:
        yield make({f"extra/settings/{key}": {"a": 1}}, f"{BESIDE}.*{key}", seal=True, free=key in own)
    later = {f"extra/settings/{key}": ABSENT for key in values["extra"]["settings"] if key not in (*SETTINGS, *own)}
    later |= {f"architecture/{key}": ABSENT for key, value in values["architecture"].items() if value is None}
    yield make(later, seal=True, free=True, taken=True)  # earlier versions had fewer settings, and no scaling of rotary frequencies


def _model_damage(folder: Path, name: str) -> Iterator[Damage]:
    """What is opened on a model that has fewer positions than texts may have tokens, more tokens than embeddings, or no tokenizer."""
    longest = SETTINGS["max_seq_len"]
    yield edited(folder, CONFIG, {"max_position_embeddings": longest}, taken=True)
    yield edited(folder, CONFIG, {"max_position_embeddings": longest - 1}, "max_seq_len")
    yield one_token_more(folder)
    yield Damage(f"{name} without {TOKENIZER}", {TOKENIZER: None}, TOKENIZER)


def refuses_saved(trial: Trial) -> Iterator[Comparison]:
    """Each key and each tensor of a saved adapter and of what it was merged into, large tensors too, and the tokenizer; what the files
    themselves say is the same after all.

    Random weights, whose rotary frequencies are scaled, are held to those of training too: of another seed they are others.
    """
    rng = trial.rng("saved")
    with tempfile.TemporaryDirectory() as parent:
        base, model = small_base(trial, Path(parent))
        settings = {**SETTINGS, "num_classes": model.scalars["classes"], "lora_rank": model.scalars["rank"], "lora_targets": "q_v"}
        settings |= {"lora_alpha": model.scalars["alpha"], "pooling": model.scalars["pooling"]}
        trial.classifiers.merged(base, settings, model.trainable, Path(parent))
        for name, config, weights in (("adapter", ADAPTER_CONFIG, {ADAPTER_WEIGHTS: PREFIX}), ("merged", CONFIG, {WEIGHTS: "", HEAD: ""})):
            folder = Path(parent) / name
            damages = [each for file in (config, BESIDE) for each in forms(folder, file, rng)]
            damages += [*_beside_damage(folder, rng), *(_adapter_damage(folder, rng) if name == "adapter" else ())]
            damages += [each for file, prefix in weights.items() for each in tensors(folder, file, prefix, rng)]
            damages += [Damage(f"no {file}", {file: None}, file) for file in (*weights, config, BESIDE)]
            damages += [Damage(f"{file} a link to nothing", {file: Path("nothing")}, file) for file in (*weights, config, BESIDE)]
            ask = partial(trial.commands.library, "probabilities", folder, TEXTS)
            yield from judged(trial, folder, damages, ask)
            trained = edited(folder, BESIDE, {"extra/settings/backend": "fused"}, seal=True, taken=True)
            yield from judged(trial, folder, [trained], partial(ask, kernels=False))
            own = base if name == "adapter" else folder
            yield from judged(trial, own, _model_damage(own, name), ask)
            if name == "adapter":
                said = rf"{re.escape(str(base))}: .*{re.escape(str(folder))}"  # what is to be replaced, and what was trained on it
                yield from judged(trial, base, [replace(each, named=said) for each in _ulps(base, WEIGHTS, "embed_tokens.weight")], ask)
        random = Path(parent) / "random"
        untrained = {**settings, "class_weights": "balanced"}  # of which a run makes numbers
        trial.classifiers.saved_on_random({**model.scalars, **SCALED, "vocab": 260}, untrained, random)
        said = json.loads((random / BESIDE).read_text())["extra"]["settings"]
        yield from same("settings of an adapter that no run has trained", untrained, {key: said[key] for key in untrained})
        trial.classifiers.saved_again(random, Path(parent) / "random again")
        yield from same("files of an adapter on random weights that is saved again", *map(content, (random, Path(parent) / "random again")))
        damages = list(_random_damage(random, rng))
        yield from judged(trial, random, damages, partial(trial.commands.library, "probabilities", random, TEXTS))
        large = Path(parent) / "large"
        trial.classifiers.saved_on_random({**model.scalars, "vocab": 260}, {**settings, "num_classes": LARGE, "lora_rank": LARGE}, large)
        of_large = partial(trial.commands.library, "probabilities", large, TEXTS[:1])
        yield from same("shape of answers by one thread and by three", of_large(threads=1).shape, of_large(threads=3).shape)
        yield from _beside_another_base(trial, model, Path(parent))
        yield from judged(trial, large, _ulps(large, ADAPTER_WEIGHTS), of_large)
        huge = Path(parent) / "huge"
        trial.classifiers.saved_on_random({**model.scalars, "vocab": 260}, {**settings, "num_classes": HUGE}, huge)
        of_huge = partial(trial.commands.library, "probabilities", huge, TEXTS[:1])
        yield from judged(trial, huge, _ulps(huge, ADAPTER_WEIGHTS, "score.weight"), of_huge)


def _beside_another_base(trial: Trial, model: Model, parent: Path) -> list[Comparison]:
    """An adapter's base is the one that it names, whatever lies beside a copy of the adapter, and so is the tokenizer: others leave theirs
    in an adapter's folder."""
    other = replace(model, decoder={name: value[::-1].copy() for name, value in model.decoder.items()})
    other.write_checkpoint(parent / "elsewhere" / "base")
    shutil.copyfile(parent / "base" / TOKENIZER, parent / "elsewhere" / "base" / TOKENIZER)
    copy = shutil.copytree(parent / "adapter", parent / "elsewhere" / "adapter")
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "b"}
    (copy / TOKENIZER).write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": words}))
    answers = [trial.commands.library("probabilities", folder, TEXTS) for folder in (parent / "adapter", copy)]
    found = same("answers of an adapter beside another base of that name", *answers)
    return found + _with_another_tokenizer(trial, parent)


def _with_another_tokenizer(trial: Trial, parent: Path) -> list[Comparison]:
    """An adapter that is opened again answers by the tokenizer that its base has then, also where that was written over in its place, which
    leaves the folder's time as it was."""
    ask = partial(trial.commands.library, "probabilities", parent / "adapter", TEXTS)
    before, tokens = ask(), json.loads((parent / "base" / TOKENIZER).read_text())
    (parent / "base" / TOKENIZER).write_text(json.dumps({**tokens, "normalizer": {"type": "Prepend", "prepend": TEXTS[0]}}))
    now = ask()
    (parent / "base").rename(parent / "written over")
    shutil.copytree(parent / "written over", parent / "base")
    os.utime(parent / "base")
    changed = value_at_least("answers that change with the tokenizer", int((now != before).sum()), 1)
    return [changed, *same("answers once the base's tokenizer was written over", ask(), now)]


def _ulps(folder: Path, file: str, ends: str = "") -> Iterator[Damage]:
    """Each tensor, or one of that end of its name, one ulp off."""
    whole = load((folder / file).read_bytes())
    for name, value in ((name, value) for name, value in whole.items() if name.endswith(ends)):
        changed = value.copy()
        one_ulp_off(changed)
        yield Damage(f"{file}: {name} of {value.size:,} numbers one ulp off", {file: save({**whole, name: changed})}, f"{file}.*tensor")


def _random_damage(folder: Path, rng: Generator) -> Iterator[Damage]:
    """The settings of an adapter on random weights with another seed, and another checksum of any of those."""
    kept = json.loads((folder / BESIDE).read_text())["checksums"]["base"]
    name = str(rng.choice(sorted(kept)))
    yield edited(folder, BESIDE, {"extra/settings/seed": SETTINGS["seed"] + 1}, "random weights.*not the one", seal=True)
    yield edited(folder, BESIDE, {f"checksums/base/{name}": another(kept[name])}, f"random weights.*{name}", seal=True)
    values: tuple[Any, ...] = (0, False, [], {})
    for value in values:
        yield edited(folder, ADAPTER_CONFIG, {"base_model_name_or_path": value})
    for part in ({}, {"surplus": 1}, [1], "small", {"rope_scaling": {"surplus": 1}}):
        yield edited(folder, BESIDE, {"extra/random_architecture": part}, f"{BESIDE}.*random_architecture", seal=True)
