"""Adapters merged into the base weights: the sums, the logits of the merged model, and the base that a run merges into."""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, compare
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF
from blackswan.falsifiers.system import config_files
from blackswan.falsifiers.system.adapter_files import (
    ADAPTER_CONFIG,
    BESIDE,
    CONFIG,
    HEAD,
    PEFT_DEFAULTS,
    WEIGHTS,
    Model,
    base_weight,
    generated,
    one_ulp_off,
    projections,
    shipped,
    target_modules,
)
from blackswan.falsifiers.system.adapters import (
    DTYPES,
    EMBEDDING,
    drawn_dtypes,
    expected_logits,
    has_pt_metadata,
    read_json,
    saved,
    within_noise,
)
from blackswan.falsifiers.system.derived_damage import edited
from blackswan.falsifiers.system.same import NO_LETTER, content, same, same_keys, same_tensors
from blackswan.falsifiers.system.trial import Trial, reads_files
from blackswan.reference.table import Array

LARGE = {"hidden": 64, "intermediate": 33_001, "layers": 1}
"""Sizes by which projections have more than 2²¹ numbers, of which some have an odd number of rows."""


@reads_files
def merged_weights_are_sums(trial: Trial) -> list[Comparison]:
    """Merged weights are W + (alpha/r) B A up to one rounding to the stored dtype and float32 arithmetic, with W dequantised from NF4.

    The other tensors, the head and config.json are as they were. The base may be in several dtypes, and each weight keeps its own; the
    adapter is in any dtype or in several, and one of its updates is zero; torch's default dtype may be any. It is asked of an adapter too
    that was trained in another dtype than the checkpoint's, of eleven layers, and in a fifth of the cases of weights with more than 2²¹
    numbers.
    """
    rng, dtypes = trial.rng("model"), list(DTYPES)
    stored, trained_in = map(str, rng.permutation(dtypes[:3])[:2])
    dtype, fixed = str(rng.choice(dtypes)), dict[str, Any]()
    if trial.seed % 4 == 0:  # what has no update there keeps more digits than the sum
        dtype, fixed = "float64", {"nf4": False, "targets": "q_v"}
    model, other = generated(rng, trial.seed, dtype, **fixed), _rounded_in_training(trial, stored, trained_in)
    own = drawn_dtypes(rng, model)
    model = replace(model, trainable={name: value.astype(own[name]) for name, value in model.trainable.items()})
    for one in (model, other):  # an update that is zero, as it is before the first step
        one.trainable[str(rng.choice([name for name in one.trainable if name.endswith("lora_B.weight")]))][:] = 0
    if trial.seed % 2:
        drawn = {name: STORAGE[model.dtype if name == EMBEDDING else str(rng.choice(dtypes))] for name in model.decoder}
        model = replace(model, decoder={name: value.astype(drawn[name]) for name, value in model.decoder.items()})
    large = [generated(rng, trial.seed, "float32", targets="all", **LARGE)] if trial.seed % 5 == 0 else []
    deep = generated(trial.rng("deep"), trial.seed, "float32", layers=11)
    return [each for one in (model, other, deep, *large) for each in _merged_sums(trial, one)] + _too_large_when_merged(trial, rng)


def _too_large_when_merged(trial: Trial, rng: Generator) -> list[Comparison]:
    """A sum that the base's dtype does not hold, and another tensor that is not finite, are refused by name, and nothing is written; large
    numbers are merged."""
    model = generated(rng, trial.seed, "float16", nf4=False, targets="q_v")
    path = str(rng.choice([path for path in projections(model) if path.endswith(target_modules(model))]))
    model.decoder[f"{path}.weight"][0, 0] = np.finfo(np.float16).max
    model.trainable[f"{path}.lora_A.weight"][:, 0] = model.trainable[f"{path}.lora_B.weight"][0] = 100.0
    found = _refused_merge(trial, model, "a sum that float16 does not hold", path)
    damaged = generated(rng, trial.seed, "float32", **({"nf4": False, **LARGE} if trial.seed % 5 == 1 else {}))
    large = [name for name, value in damaged.decoder.items() if value.size > 2**21]
    name = str(rng.choice(large or [name for name in damaged.decoder if "_proj." not in name]))
    damaged.decoder[name].reshape(-1)[-1:] = rng.choice([np.nan, np.inf, -np.inf])
    found += _refused_merge(trial, damaged, "a base that is not finite", name)
    own, factor = model.trainable, f"{path}.lora_A.weight"
    less = {name: value for name, value in own.items() if name != factor}
    for kind, others in (
        ("one less", less),
        ("one of another name", {**less, f"base_model.model.{factor}": own[factor]}),
        ("one more", {**own, factor.replace("layers.0", "layers.9").replace("layers.1", "layers.9"): own[factor]}),
        ("one that is turned", {**own, factor: np.ascontiguousarray(own[factor].T)}),
    ):
        found += _refused_merge(trial, model, f"an adapter in memory of {kind}", "lora_A", others)
    much = generated(rng, trial.seed, "float16")  # whose numbers add up to more than float16 holds
    for name in [name for name in much.decoder if "norm" in name or name == EMBEDDING]:
        much.decoder[name][:] = 5e4
    return found + _merged_sums(trial, much)


def _refused_merge(trial: Trial, model: Model, name: str, tensor: str, others: Mapping[str, Array] | None = None) -> list[Comparison]:
    with saved(trial, model) as folder:
        ask = partial(trial.files.merge, folder / "adapter", folder / "base", folder / "merged", tensors=others)
        refused = trial.refuses(name, ask, re.escape(tensor), "ValueError")
        return [refused, *same("files after a refused merge", ["adapter", "base"], sorted(each.name for each in folder.iterdir()))]


def _merged_sums(trial: Trial, model: Model) -> list[Comparison]:
    default = str(trial.rng(f"default dtype beside {model.dtype}").choice([model.dtype, *DTYPES]))
    with saved(trial, model, merged=True, default=default) as folder:
        kept = [read_json(folder / part / BESIDE)["extra"] for part in ("adapter", "merged")]
        return same("what else a merged model keeps of its adapter", *kept) + _sums(model, folder / "merged", folder / "base")


@reads_files
def merged_by_the_run(trial: Trial) -> Iterator[Comparison]:
    """A run's pipeline and the command `merge` write the weights that the adapter was trained on, plus its update.

    Training is on the shipped float32 checkpoint in NF4, in bfloat16 and float32 by turns, doubly quantised or not. The adapter is not
    opened on a base that differs by one number.
    """
    rng = trial.rng("run")
    model = replace(shipped(rng, trial.seed, nf4=True), trained_in=("bfloat16", "float32")[trial.seed % 2])
    with tempfile.TemporaryDirectory() as parent:
        trial.classifiers.merged(CHECKPOINT, _settings(model), model.trainable, Path(parent))
        yield from _sums(model, Path(parent) / "merged", CHECKPOINT)
        yield from _sums(model, Path(parent) / "opened", CHECKPOINT)
        (second := Path(parent) / "second").mkdir()  # a merged model is a checkpoint, on which another adapter may be trained
        trial.classifiers.merged(first := Path(parent) / "merged", _settings(model), model.trainable, second)
        yield from _sums(replace(model, decoder=load_file(first / WEIGHTS)), second / "merged", first)
        yield from _saved_again(trial, Path(parent))
        yield from _refuses_another_base(trial, model, Path(parent), rng)


def _settings(model: Model) -> dict[str, Any]:
    own = model.settings
    found = {
        "num_classes": own.classes,
        "lora_rank": own.rank,
        "lora_alpha": own.alpha,
        "lora_targets": own.targets.replace("+", ","),
        "pooling": own.pooling,
    }
    return found | {"quantize_nf4": own.nf4, "double_quantize": own.double_quantize, "dtype": model.trained_in, "max_seq_len": 64}


def _saved_again(trial: Trial, parent: Path) -> list[Comparison]:
    """An adapter that is opened and saved again has the same files, checksums of its base and all, also where the base's lie beside it.

    It names the base on which it was opened, whatever letters that name has, or none in UTF-8, blanks at its end and a `..` behind a link,
    by which it is found again; and the backend that trained it, which may not run here. So does one that had no checksums, as PEFT's own,
    and then it has those of tensors and base.
    """
    by_hand = edited(parent / "adapter", BESIDE, {"extra/settings/backend": "fused"}, seal=True).files[BESIDE]
    assert isinstance(by_hand, bytes)
    (parent / "adapter" / BESIDE).write_text(json.dumps(json.loads(by_hand), indent=2) + "\n")
    stored, beside = content(parent / "adapter"), Path(shutil.copytree(parent / "adapter", parent / "beside"))
    for name in (CONFIG, "tokenizer.json"):
        shutil.copy(CHECKPOINT / name, beside)
    trial.classifiers.saved_again(beside, parent / "again")
    again = content(parent / "again")
    found = same("files of an adapter that is saved again", *({**each, BESIDE: json.loads(each[BESIDE])} for each in (stored, again)))
    (deep := parent / "deep" / "er").mkdir(parents=True)
    (parent / "link").symlink_to(deep)
    (moved := parent / "link" / ".." / " größer [1]* 100% ").symlink_to(CHECKPOINT)  # in the folder `deep`
    trial.classifiers.saved_again(parent / "adapter", parent / "on moved", moved)
    trial.classifiers.saved_again(parent / "on moved", parent / "moved again")  # it is found by what the adapter calls it
    named = read_json(parent / "moved again" / ADAPTER_CONFIG)["base_model_name_or_path"]
    found += same("base of an adapter that was opened on another name of it", str(moved), named)
    trial.files.export(CHECKPOINT, unread := parent / f"mod{NO_LETTER}le.apr")
    trial.classifiers.saved_again(parent / "adapter", parent / "on unread", unread)
    trial.classifiers.saved_again(parent / "on unread", parent / "unread again")
    named = read_json(parent / "unread again" / ADAPTER_CONFIG)["base_model_name_or_path"]
    found += same("base by a name that is not UTF-8", str(unread), named)
    (bare := Path(shutil.copytree(parent / "adapter", parent / "bare")) / ADAPTER_CONFIG).with_name(BESIDE).unlink()
    bare.write_text(json.dumps(PEFT_DEFAULTS | read_json(bare)))
    trial.classifiers.saved_again(bare.parent, parent / "from bare")
    kept, own = (read_json(parent / each / BESIDE)["checksums"] for each in ("adapter", "from bare"))
    return found + same("checksums of an adapter that had none", kept, own)


def _refuses_another_base(trial: Trial, model: Model, parent: Path, rng: Generator) -> list[Comparison]:
    """The adapter is not opened on a checkpoint of which one number of one tensor is the next that there is, and a run does not merge into
    one that has become so since it was opened."""
    drawn = str(rng.choice(sorted(each for each in model.decoder if "_proj." in each)))
    found = []
    for number, name in enumerate((drawn, EMBEDDING, "model.norm.weight")):  # any, the largest, and what is read last
        (folder := parent / f"other {number}").mkdir()
        found += _refuses_one_ulp(trial, model, parent / "adapter", folder, name)
    return found


def _refuses_one_ulp(trial: Trial, model: Model, adapter: Path, parent: Path, name: str) -> list[Comparison]:
    other, tensors = Path(shutil.copytree(CHECKPOINT, parent / "other")), load_file(CHECKPOINT / WEIGHTS)
    one_ulp_off(tensors[name])

    def change() -> None:
        (other / WEIGHTS).unlink()  # it may be mapped
        save_file(tensors, other / WEIGHTS)

    place = parent / "late"
    place.mkdir()
    merge = partial(trial.classifiers.merged, other, _settings(model), model.trainable, place, change)
    found = [trial.refuses(f"a base whose {name} has become one ulp off", merge, re.escape(name))]
    found += same("what is merged into a base that has changed", False, (place / "merged").exists())
    opened = partial(trial.classifiers.opened, adapter, other)
    again, late = partial(trial.classifiers.read_again, adapter, other), partial(trial.classifiers.opened, place / "adapter", other)
    found.append(trial.refuses(f"a base whose {name} is one ulp off, read again", again, re.escape(name)))
    found.append(trial.refuses(f"a base whose {name} was one ulp off when the adapter was saved", late, re.escape(name)))
    return [*found, trial.refuses(f"a base whose {name} is one ulp off", opened, re.escape(name))]


def _sums(model: Model, merged: Path, base_folder: Path) -> list[Comparison]:
    stored, head = (load_file(merged / name) for name in (WEIGHTS, HEAD))
    config, base = (read_json(folder / CONFIG) for folder in (merged, base_folder))
    changed = [path for path in projections(model) if model.scalars["nf4"] or f"{path}.lora_A.weight" in model.trainable]
    paths = sorted(f"{path}.weight" for path in changed)
    plain, others = ({name: value for name, value in tensors.items() if name not in paths} for tensors in (model.decoder, stored))
    found = same_tensors({name: model.trainable[name] for name in ("score.weight", "score.bias")}, head)
    found += (
        has_pt_metadata(merged / WEIGHTS)
        + same_keys(CONFIG, config_files.others(base), config)
        + same(CONFIG, *map(config_files.said, (base, config)))
        + same(f"dtype in {CONFIG}", model.dtype, config.get("dtype"))
    )
    return found + same_tensors(plain, others) + [_sum(model, name, stored.get(name)) for name in paths]


@reads_files
def merged_gives_the_logits(trial: Trial) -> Iterator[Comparison]:
    """The merged checkpoint gives the reference's logits of the unmerged classifier, within the noise of merging.

    This is asked on the shipped checkpoint and on small random ones, one of which was trained on NF4 codes of weights in bfloat16.
    """
    rng = trial.rng("model")
    for model in (shipped(rng, trial.seed), generated(rng, trial.seed, "float32"), _rounded_in_training(trial)):
        with saved(trial, model, merged=True) as folder:
            actual = trial.files.merged_logits(folder / "merged", model.input_ids, model.mask)
        yield from within_noise(trial, model, expected_logits(model), actual, merge=True)


def _rounded_in_training(trial: Trial, stored: str = "float32", trained_in: str = "bfloat16") -> Model:
    """A small random one that was trained in another dtype on NF4, whose codes and absmax are those of the rounded weights."""
    return replace(generated(trial.rng("rounded"), trial.seed, stored, nf4=True), trained_in=trained_in)


def _sum(model: Model, name: str, merged: Array | None) -> Comparison:
    if merged is None:
        return broken(name, "missing from the merged checkpoint")
    if merged.dtype != model.decoder[name].dtype:
        return broken(name, "dtype", str(model.decoder[name].dtype), str(merged.dtype))
    path, dtype, scalars = name.removesuffix(".weight"), merged.dtype.name, model.scalars
    weight, update, size = base_weight(model, path), np.zeros(()), np.zeros(())
    product = single = UNIT_ROUNDOFF["float32"]
    if f"{path}.lora_A.weight" in model.trainable:
        factors = [model.trainable[f"{path}.lora_{factor}.weight"] for factor in "AB"]
        product = UNIT_ROUNDOFF["float64"] if any(factor.dtype == np.float64 for factor in factors) else single
        a, b = (np.asarray(factor, np.float64) for factor in factors)
        scale = scalars["alpha"] / scalars["rank"]
        update, size = scale * (b @ a), scale * (np.abs(b) @ np.abs(a))
    exact = weight + update
    unit = UNIT_ROUNDOFF[dtype]
    added = UNIT_ROUNDOFF["float64"] if dtype == "float64" else product
    least = 2.0**-25 if dtype == "float16" else 2.0**-120  # half of the smallest number
    dequantised = (single - added) * np.abs(weight) if scalars["nf4"] else 0.0  # of a W from NF4 the u is float32's
    errors = dequantised + added * (np.abs(weight) + np.abs(exact)) + product * (scalars["rank"] + 2) * size
    bound = unit * np.abs(exact) + (1 + unit) * errors + least
    return compare(f"{name} / bound", exact / bound, np.asarray(merged, np.float64) / bound, Errors.flat(1.0), unit)
