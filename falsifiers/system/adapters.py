"""Adapters, merged checkpoints and saved checkpoints: the files that a subject writes and reads, held to NumPy, JSON and the reference."""

import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from blackswan import reference
from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, compare
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF
from blackswan.falsifiers.subjects.doors.files import PreparedHead
from blackswan.falsifiers.system import config_files
from blackswan.falsifiers.system.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BESIDE,
    CONFIG,
    HEAD,
    PREFIX,
    WEIGHTS,
    Model,
    base_weight,
    generated,
    one_ulp_off,
    projections,
    read_adapter,
    shipped,
    target_modules,
)
from blackswan.falsifiers.system.apr_spellings import CLASSES
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.trial import Rounded, Trial, reads_files
from blackswan.reference.table import Array, Arrays, Table

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "task_type": ("SEQ_CLS", None),
    "modules_to_save": (["score"], ["classifier", "score"]),
    "revision": (None, "main"),
    "lora_dropout": (0.0, 0.1),
    "inference_mode": (True, False),
    "exclude_modules": (None, []),
    "auto_mapping": (None, {"base_model_class": "Qwen2ForSequenceClassification"}),
}
"""What PEFT may say of an adapter without a change of what it computes: the starts leave the base as it is."""
STEPS = 14
"""A save is killed at each of so many steps in the file system; `impl` takes 12."""


@contextmanager
def _saved(trial: Trial, model: Model, *, merged: bool = False) -> Iterator[Path]:
    """A folder with the model's checkpoint as `base` and what the subject saves: the `adapter` and, where asked for, `merged`."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        base = model.write_checkpoint(folder / "base")
        trial.files.save_adapter(folder / "adapter", base, model.settings, model.trainable)
        if merged:
            trial.files.merge(folder / "adapter", base, folder / "merged", model.trained_in)
        yield folder


@reads_files
def adapter_has_pefts_format(trial: Trial) -> list[Comparison]:
    """After a save, adapter_model.safetensors has PEFT's names, dtypes and bits, and adapter_config.json PEFT's keys; all may read
    the files."""
    merged = trial.seed % 4 == 0
    model = generated(trial.rng("model"), trial.seed, "float32", **({"pooling": "last", "nf4": False} if merged else {}))
    with _saved(trial, model, merged=merged) as folder:
        stored, config = load_file(folder / "adapter" / ADAPTER_WEIGHTS), _json(folder / "adapter" / ADAPTER_CONFIG)
        prepared = [each for part in ("adapter", *["merged"] * merged) for each in _prepared(trial, model, folder / part)]
        metadata = _metadata(folder / "adapter" / ADAPTER_WEIGHTS)
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (folder / "adapter").iterdir()}
    said = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "r": model.scalars["rank"],
        "lora_alpha": model.scalars["alpha"],
        "base_model_name_or_path": str(folder / "base"),
        "modules_to_save": ["score"],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "target_modules": sorted(target_modules(model)),
    }
    config["target_modules"] = sorted(config.get("target_modules") or [])
    tensors = _same_tensors({PREFIX + name: value for name, value in model.trainable.items()}, stored)
    readable = same("modes of the files", dict.fromkeys(modes, oct(0o644)), modes)
    return _same_keys(ADAPTER_CONFIG, said, config) + tensors + metadata + readable + prepared


def _prepared(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """transformers' classes are given the head, bias and all, in their dtype; those pool the last token, and another pooling is refused."""
    dtype = str(trial.rng("prepared").choice(["float32", "bfloat16", "float16"]))
    ask = partial(trial.files.prepared_head, folder, model.scalars["hidden"], dtype)
    if model.scalars["pooling"] != "last":
        return [trial.refuses("head for another pooling", ask, f"{BESIDE}.*pooling", "ValueError")]
    weight, bias = (model.trainable[name].astype(STORAGE[dtype]) for name in ("score.weight", "score.bias"))
    wider = partial(trial.files.prepared_head, folder, model.scalars["hidden"] + 1)
    refused = trial.refuses("a model of another width", wider, f"{model.scalars['hidden']} inputs", "ValueError")
    found = ask()
    dtypes = same("dtype of the head for transformers", dtype, str(found.weight.dtype))
    return [refused, *dtypes, *same("head for transformers", PreparedHead(weight, bias, len(bias), len(bias)), found)]


def _metadata(file: Path) -> list[Comparison]:
    """A safetensors file says `pt` of itself: transformers opens none that does not."""
    with safe_open(file, "np") as opened:
        return same(f"{file.name}, metadata", {"format": "pt"}, opened.metadata())


def adapter_arrives_exactly(trial: Trial) -> list[Comparison]:
    """An adapter written as PEFT writes it, in any float dtype, its targets by names or paths, with or without a head bias, with whatever
    start or place of training that changes nothing, arrives with tensors and settings."""
    rng = trial.rng("model")
    model = generated(rng, trial.seed, "float32", nf4=False, pooling="last")
    dtype, head_bias = STORAGE[str(rng.choice(["float32", "bfloat16", "float16", "float64"]))], bool(rng.integers(2))
    with tempfile.TemporaryDirectory() as folder:
        neutral = {key: values[int(rng.integers(len(values)))] for key, values in NEUTRAL.items()}
        written = model.write_peft(Path(folder) / "peft", str(dtype), head_bias, paths=bool(rng.integers(2)), **neutral)
        found = trial.files.load_adapter(written, model.write_checkpoint(Path(folder) / "base"))
    expected = {name: value.astype(dtype) for name, value in model.trainable.items()}
    if not head_bias:
        expected["score.bias"] = np.zeros_like(expected["score.bias"])
    return _same_keys("settings", asdict(model.settings), asdict(found.settings)) + _same_tensors(expected, found.tensors)


@reads_files
def saved_adapter_gives_the_logits(trial: Trial) -> list[Comparison]:
    """The reference's logits of a saved adapter's files are exactly the model's, and the subject's are so within noise.

    This is asked on the shipped checkpoint and on small random ones, the architecture of each spelled in a way of its own.
    """
    rng, found = trial.rng("model"), []
    for model in (shipped(rng, trial.seed), *(generated(rng, trial.seed, "float32") for _ in range(3))):
        with _saved(trial, model) as folder:
            stored = read_adapter(folder / "adapter", model.scalars)
            actual = trial.files.adapter_logits(folder / "adapter", folder / "base", model.input_ids, model.mask)
        if stored.keys() != model.trainable.keys():
            return [broken("tensors of the file", "names", str(sorted(model.trainable)), str(sorted(stored)))]
        files = {**model.inputs(), **{f"parameters/{name}": value for name, value in stored.items()}}
        read = reference.evaluate("classifier_forward", files, model.scalars)["logits"]
        expected = _expected(model)
        found += same("the reference's logits of the files", expected, read)
        found += _within_noise(trial, model, expected, actual, merge=False)
    return found


@reads_files
def merged_weights_are_sums(trial: Trial) -> list[Comparison]:
    """Merged weights are W + (alpha/r) B A up to one rounding to the stored dtype and float32 arithmetic, with W dequantised from NF4.

    The other tensors, the head and config.json are as they were. It is asked of an adapter too that was trained on a float32 checkpoint in
    bfloat16.
    """
    rng = trial.rng("model")
    model, other = generated(rng, trial.seed, str(rng.choice(["float32", "bfloat16", "float16"]))), _rounded_in_training(trial)
    return _merged_sums(trial, model) + _merged_sums(trial, other) + _too_large_when_merged(trial, rng)


def _too_large_when_merged(trial: Trial, rng: Generator) -> list[Comparison]:
    """A sum that the base's dtype does not hold is refused by its tensor's name, and nothing is written."""
    model = generated(rng, trial.seed, "float16", nf4=False, targets="q_v")
    path = str(rng.choice([path for path in projections(model) if path.endswith(target_modules(model))]))
    model.decoder[f"{path}.weight"][0, 0] = np.finfo(np.float16).max
    model.trainable[f"{path}.lora_A.weight"][:, 0] = model.trainable[f"{path}.lora_B.weight"][0] = 100.0
    with _saved(trial, model) as folder:
        ask = partial(trial.files.merge, folder / "adapter", folder / "base", folder / "merged")
        refused = trial.refuses("a sum that float16 does not hold", ask, re.escape(path), "ValueError")
        return [refused, *same("files after a refused merge", ["adapter", "base"], sorted(each.name for each in folder.iterdir()))]


def _merged_sums(trial: Trial, model: Model) -> list[Comparison]:
    with _saved(trial, model, merged=True) as folder:
        return _sums(model, folder / "merged", folder / "base")


@reads_files
def merged_by_the_run(trial: Trial) -> list[Comparison]:
    """A run's pipeline and the command `merge` write the weights that the adapter was trained on, plus its update.

    Training is on the shipped float32 checkpoint in NF4, in bfloat16 and float32 by turns, doubly quantised or not. The adapter is not
    opened on a base that differs by one number.
    """
    rng = trial.rng("run")
    model = replace(shipped(rng, trial.seed, nf4=True), trained_in=("bfloat16", "float32")[trial.seed % 2])
    with tempfile.TemporaryDirectory() as parent:
        trial.classifiers.merged(CHECKPOINT, _settings(model), model.trainable, Path(parent))
        found = _sums(model, Path(parent) / "merged", CHECKPOINT) + _sums(model, Path(parent) / "opened", CHECKPOINT)
        return found + _refuses_another_base(trial, model, Path(parent), rng)


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


def _refuses_another_base(trial: Trial, model: Model, parent: Path, rng: Generator) -> list[Comparison]:
    """The adapter is not opened on a checkpoint of which one number of one tensor is the next that there is, and a run does not merge into
    one that has become so since it was opened."""
    kind = ("norm.weight", "_proj.", "embed_tokens")[trial.seed % 3]
    name = str(rng.choice(sorted(each for each in model.decoder if kind in each)))
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
    opened = partial(trial.classifiers.opened, parent / "adapter", other)
    return [*found, trial.refuses(f"a base whose {name} is one ulp off", opened, re.escape(name))]


def _sums(model: Model, merged: Path, base_folder: Path) -> list[Comparison]:
    stored, head = (load_file(merged / name) for name in (WEIGHTS, HEAD))
    config, base = (_json(folder / CONFIG) for folder in (merged, base_folder))
    paths = sorted(f"{path}.weight" for path in projections(model))
    plain, others = ({name: value for name, value in tensors.items() if name not in paths} for tensors in (model.decoder, stored))
    found = _same_tensors({name: model.trainable[name] for name in ("score.weight", "score.bias")}, head)
    found += (
        _metadata(merged / WEIGHTS)
        + _same_keys(CONFIG, config_files.others(base), config)
        + same(CONFIG, *map(config_files.said, (base, config)))
        + same(f"dtype in {CONFIG}", model.dtype, config.get("dtype"))
    )
    return found + _same_tensors(plain, others) + [_sum(model, name, stored.get(name)) for name in paths]


@reads_files
def merged_gives_the_logits(trial: Trial) -> list[Comparison]:
    """The merged checkpoint gives the reference's logits of the unmerged classifier, within the noise of merging.

    This is asked on the shipped checkpoint and on small random ones, one of which was trained on NF4 codes of weights in bfloat16.
    """
    rng, found = trial.rng("model"), []
    for model in (shipped(rng, trial.seed), generated(rng, trial.seed, "float32"), _rounded_in_training(trial)):
        with _saved(trial, model, merged=True) as folder:
            actual = trial.files.merged_logits(folder / "merged", model.input_ids, model.mask)
        found += _within_noise(trial, model, _expected(model), actual, merge=True)
    return found


def checkpoint_arrives_exactly(trial: Trial) -> list[Comparison]:
    """Every tensor of the shipped checkpoint is loaded bit for bit, and no other tensor; also where no call reads a whole one."""
    stored = load_file(CHECKPOINT / WEIGHTS)
    least = min(value.nbytes for value in stored.values())
    return [each for most in (None, least // 2) for each in _same_tensors(stored, trial.files.load_decoder(CHECKPOINT, most))]


@reads_files
def saved_checkpoint_is_exact(trial: Trial) -> list[Comparison]:
    """A checkpoint that the subject loads and saves keeps its tensors, in the file by NumPy and loaded again, and its architecture.

    Beside a tied embedding its copy may be stored as an output layer, as some writers do; it is no tensor of its own.
    """
    rng = trial.rng("model")
    model = generated(rng, trial.seed, str(rng.choice(["float32", "bfloat16", "float16", "float64"])))
    with tempfile.TemporaryDirectory() as parent:
        base, copy = model.write_checkpoint(Path(parent) / "base"), Path(parent) / "copy"
        if model.scalars["tied"] and rng.integers(2):
            save_file(model.decoder | {"lm_head.weight": model.decoder["model.embed_tokens.weight"]}, base / WEIGHTS)
        loaded, said = trial.files.copy_checkpoint(base, copy), _json(copy / CONFIG)
        stored, architectures = load_file(copy / WEIGHTS), [config_files.said(_json(each / CONFIG)) for each in (base, copy)]
        elder = config_files.said({key: value for key, value in _json(copy / CONFIG).items() if key != "rope_parameters"})
    found = same(CONFIG, *architectures) + same(f"{CONFIG} as transformers 4 reads it", architectures[0], elder)
    found += _same_keys(CONFIG, {"dtype": model.dtype, "architectures": [CLASSES[model.scalars["family"]]]}, said)
    return _same_tensors(model.decoder, stored) + found + _same_tensors(model.decoder, loaded)


@reads_files
def interrupted_save_leaves_a_whole_adapter(trial: Trial) -> list[Comparison]:
    """A save over an adapter that is killed at any step leaves the old one or the new one; without room on disk it leaves the old one.

    Every file of the new adapter differs from the old one's.
    """
    rng = trial.rng("interruption")
    model, found = generated(rng, trial.seed, "float32"), []
    changed = {name: value + np.float32(1.0) for name, value in model.trainable.items()}
    settings = replace(model.settings, alpha=2 * model.settings.alpha, pooling="last" if model.settings.pooling == "mean" else "mean")
    with _saved(trial, model) as folder:
        base, adapter, old = folder / "base", folder / "adapter", content(folder / "adapter")
        found += _on_the_disk(trial.files.flushed_save(folder / "wanted", base, settings, changed), content(folder / "wanted"))
        found += _others_are_left(trial, model, folder)
        wanted, size = content(folder / "wanted"), len(old[ADAPTER_WEIGHTS])
        for limit in (0, int(rng.integers(1, size))):
            said = trial.files.interrupted_save(adapter, base, settings, changed, limit=limit)
            found.append(_whole(f"files limited to {limit} of {size} bytes", content(adapter), [old]))
            if not re.match(f"OSError: .*{re.escape(str(adapter))}", said):
                found.append(broken("error of a disk that takes no more", "names no folder", f"OSError: … {adapter}", said))
            hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
            found += same("what a failed save leaves beside", [], hidden)
        for step in range(STEPS):
            trial.files.interrupted_save(adapter, base, settings, changed, step=step)
            found.append(_whole(f"killed at step {step}", content(adapter), [old, wanted]))
    return found


def _on_the_disk(flushed: list[str], files: Mapping[str, bytes]) -> list[Comparison]:
    """Every file of a new folder and its list of names were flushed, and at last that of the folder around, in which it has its name."""
    missing = sorted(files.keys() - {Path(name).name for name in flushed})
    return same("files that were not flushed", [], missing) + same("flushed at last", ".", flushed[-1] if flushed else "")


def _others_are_left(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """What another process still writes beside an adapter is left alone, and what one left half done goes; a folder that is no adapter
    is not written over."""
    half, other = folder / ".partial-again [1].abcdefgh", folder / "other"
    for each in (half, other):
        each.mkdir()
        (each / "file").write_text("x")
    save = partial(trial.files.save_adapter, base=folder / "base", settings=model.settings, tensors=model.trainable)
    handle = os.open(half, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        save(folder / "again [1]")
        found = same("what another process writes", {"file": b"x"}, content(half))
    finally:
        os.close(handle)
    save(folder / "again [1]")
    found += same("what was left half done", {}, content(half))
    found.append(trial.refuses("over a folder that is no adapter", partial(save, other), "other exists", "FileExistsError"))
    found += same("a folder that is no adapter", {"file": b"x"}, content(other))
    return found + _through_a_link(trial, model, folder) + _without_exchange(trial, model, folder)


def _through_a_link(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """A save over a link to an adapter replaces that adapter, and the link stays."""
    place = folder / "elsewhere"
    place.mkdir()
    (place / "link").symlink_to("../again [1]")
    changed = {name: -value for name, value in model.trainable.items()}
    trial.files.save_adapter(place / "link", folder / "base", model.settings, changed)
    found = _same_tensors({PREFIX + name: value for name, value in changed.items()}, load_file(folder / "again [1]" / ADAPTER_WEIGHTS))
    beside = [(each.name, each.is_symlink()) for each in place.iterdir()]
    return found + same("names beside a link, and whether it is one", [("link", True)], beside)


def _without_exchange(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """A system that cannot exchange two names leaves the new adapter too, one that fails at it the old one, and nothing beside."""
    place, found = folder / "renamed", []
    save = partial(trial.files.save_adapter, place / "adapter", folder / "base", model.settings)
    save(model.trainable)
    for times, code in enumerate((0, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP), start=2):
        tensors = {name: times * value for name, value in model.trainable.items()}
        save(tensors, exchange=code)
        stored = load_file(place / "adapter" / ADAPTER_WEIGHTS)
        found += _same_tensors({PREFIX + name: value for name, value in tensors.items()}, stored)
    for failure in ({"exchange": errno.EACCES}, {"exchange": 0, "renames": 0}, {"exchange": 0, "renames": 1}):
        found.append(trial.refuses(f"a name that is not given {failure}", partial(save, model.trainable, **failure), "adapter", "OSError"))
        found += same(f"adapter in its place {failure}", True, (place / "adapter" / ADAPTER_WEIGHTS).is_file())
        found += _same_tensors(stored, load_file(place / "adapter" / ADAPTER_WEIGHTS)) if found[-1].held else []
    return found + same("names beside an adapter", ["adapter"], [each.name for each in place.iterdir()])


def _whole(name: str, found: dict[str, bytes], accepted: list[dict[str, bytes]]) -> Comparison:
    if found in accepted:
        return Comparison(name, True, 0.0, "exact")
    expected, actual = ({file: len(value) for file, value in files.items()} for files in (accepted[0], found))
    return broken(name, "half an adapter", str(expected), str(actual))


def _rounded_in_training(trial: Trial) -> Model:
    """A small random one in float32 that was trained in bfloat16 on NF4, whose codes and absmax are those of the rounded weights."""
    return replace(generated(trial.rng("rounded"), trial.seed, "float32", nf4=True), trained_in="bfloat16")


def _expected(model: Model) -> Array:
    return np.asarray(reference.evaluate("classifier_forward", model.inputs(), model.scalars)["logits"])


def _within_noise(trial: Trial, model: Model, expected: Array, actual: Array, *, merge: bool) -> list[Comparison]:
    """The logits of the classifier, its updates merged first or not."""
    case = Case("classifier_forward", "float32", {}, model.scalars, trial.seed, "normal", model.inputs())
    return trial.within_noise(case, _as_computed(model, merge), {"logits": expected}, {"logits": actual})


def _as_computed(model: Model, merge: bool) -> Rounded:
    """The classifier under the rounding of a table, its updates merged first or not. What NF4 makes of a weight is exact: done once."""
    weights = {f"parameters/{path}": base_weight(model, path) for path in projections(model)}

    def run(inputs: Arrays, table: Table) -> dict[str, Array]:
        values = dict(inputs)
        for name, weight in weights.items():
            plain = values[f"{name}.weight"] = weight.astype(inputs[f"{name}.weight"].dtype)
            if merge and f"{name}.lora_A.weight" in inputs:
                factors = {"lora_a": inputs[f"{name}.lora_A.weight"], "lora_b": inputs[f"{name}.lora_B.weight"]}
                alpha = {"alpha": model.scalars["alpha"]}
                values[f"{name}.weight"] = reference.evaluate("lora_merge", {"weight": plain, **factors}, alpha, table)["y"]
                values[f"{name}.lora_B.weight"] = np.zeros_like(factors["lora_b"])
        return reference.evaluate("classifier_forward", values, {**model.scalars, "nf4": False, "double_quantize": False}, table)

    return run


def _sum(model: Model, name: str, merged: Array | None) -> Comparison:
    if merged is None:
        return broken(name, "missing from the merged checkpoint")
    if merged.dtype != STORAGE[model.dtype]:
        return broken(name, "dtype", model.dtype, str(merged.dtype))
    path, scalars = name.removesuffix(".weight"), model.scalars
    weight, update, size = base_weight(model, path), np.zeros(()), np.zeros(())
    if f"{path}.lora_A.weight" in model.trainable:
        a, b = (np.asarray(model.trainable[f"{path}.lora_{factor}.weight"], np.float64) for factor in "AB")
        scale = scalars["alpha"] / scalars["rank"]
        update, size = scale * (b @ a), scale * (np.abs(b) @ np.abs(a))
    exact = weight + update
    single, unit = UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF[model.dtype]
    least = 2.0**-25 if model.dtype == "float16" else 2.0**-120  # half of the smallest number
    bound = unit * np.abs(exact) + (1 + unit) * single * (np.abs(weight) + np.abs(exact) + (scalars["rank"] + 2) * size) + least
    return compare(f"{name} / bound", exact / bound, np.asarray(merged, np.float64) / bound, Errors.flat(1.0), unit)


def _same_tensors(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> list[Comparison]:
    """Names, shapes, dtypes and bits."""
    dtypes = ({name: str(value.dtype) for name, value in tensors.items()} for tensors in (expected, actual))
    return [*same("dtypes", *dtypes), *same("tensors", expected, actual)]


def _same_keys(file: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> list[Comparison]:
    """Each expected value under its key."""
    return same(file, expected, {key: actual.get(key) for key in expected})


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found
