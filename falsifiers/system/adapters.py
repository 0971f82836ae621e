"""Checks on adapters and merged checkpoints: the files that a subject writes and reads, held to NumPy, JSON and the reference."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from blackswan import reference
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, Errors, broken, compare, compare_exactly
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.numeric.precision import STORAGE, UNIT_ROUNDOFF
from blackswan.falsifiers.system.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    HEAD,
    PREFIX,
    WEIGHTS,
    Model,
    base_weight,
    generated,
    projections,
    read_adapter,
    shipped,
)
from blackswan.reference.classifier import TARGETS
from blackswan.reference.table import Array, Arrays, Table

Run = Callable[[Arrays, Table], dict[str, Array]]


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as parent:
        yield Path(parent)


def adapter_has_pefts_format(attack: Attack, case: Case) -> list[Comparison]:
    """Names, dtype and bits of adapter_model.safetensors, and what adapter_config.json says, after a save."""
    model = generated(generator_for(case.seed, "model"), case.seed, "float32")
    with _folder() as parent:
        _save(attack, case, model, parent)
        stored, config = load_file(parent / "adapter" / ADAPTER_WEIGHTS), json.loads((parent / "adapter" / ADAPTER_CONFIG).read_text())
    said = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS",
        "r": model.scalars["rank"],
        "lora_alpha": model.scalars["alpha"],
        "base_model_name_or_path": str(parent / "base"),
        "modules_to_save": ["score"],
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "target_modules": sorted(name.rpartition(".")[2] for name in TARGETS[model.scalars["targets"]]),
    }
    found = [_equal(f"{ADAPTER_CONFIG}: {key}", value, _sorted(config.get(key))) for key, value in said.items()]
    return found + _same_tensors({PREFIX + name: value for name, value in model.trainable.items()}, stored)


def adapter_arrives_exactly(attack: Attack, case: Case) -> list[Comparison]:
    """An adapter written here as PEFT writes it, in float32 or bfloat16, with or without a head bias: tensors, rank, alpha, pooling."""
    rng = generator_for(case.seed, "model")
    model = generated(rng, case.seed, "float32", nf4=False, pooling="last")
    dtype, head_bias = str(rng.choice(["float32", "bfloat16"])), bool(rng.integers(2))
    with _folder() as parent:
        scalars = _places(model, parent) | {"folder": str(model.write_peft(parent / "peft", dtype, head_bias))}
        answer = attack.answer(case, scalars=scalars)
    scalars = model.scalars
    found = [_equal(name, scalars[name], answer[name].item()) for name in ("rank", "alpha", "classes", "nf4")]
    found.append(_equal("pooling", "last", ("mean", "last", "first")[int(answer["pooling"])]))
    expected = {name: value.astype(STORAGE[dtype]).astype(np.float32) for name, value in model.trainable.items()}
    if not head_bias:
        expected["score.bias"] = np.zeros_like(expected["score.bias"])
    found += _same_tensors(expected, _group(answer, "trainable/"))
    return found + [_equal(f"{name} in bfloat16", dtype == "bfloat16", bool(answer[f"bfloat16/{name}"])) for name in expected]


def saved_adapter_gives_the_logits(attack: Attack, case: Case) -> list[Comparison]:
    """Saved, read by NumPy and by the subject: the reference's logits of the files are exactly the model's, the subject's within noise."""
    found = []
    for model in _models(case):
        whole = _classifier(case, model)
        expected = attack.expect(whole)
        with _folder() as parent:
            _save(attack, case, model, parent)
            stored = read_adapter(parent / "adapter", model.scalars)
            scalars = {"folder": str(parent / "adapter"), "base": str(parent / "base"), **model.tokens()}
            actual = attack.answer(case, scalars=scalars)
        if stored.keys() != model.trainable.keys():
            return [broken("tensors of the file", "names", str(sorted(model.trainable)), str(sorted(stored)))]
        files = {**model.inputs(), **{f"parameters/{name}": value for name, value in stored.items()}}
        read = reference.evaluate("classifier_forward", files, model.scalars)["logits"]
        found.append(compare_exactly("the reference's logits of the files", expected["logits"], read))
        found += _within_noise(attack, whole, expected, actual, _as_computed(model, merge=False))
    return found


def merged_weights_are_sums(attack: Attack, case: Case) -> list[Comparison]:
    """|merged − (W + (alpha/r) B A)| against one rounding to the stored dtype and float32 arithmetic, W dequantised with NF4.

    The other tensors, the head and config.json are as they were. Of an adapter too that was trained on a float32 checkpoint in bfloat16.
    """
    rng = generator_for(case.seed, "model")
    model = generated(rng, case.seed, str(rng.choice(["float32", "bfloat16"])))
    return _merged_sums(attack, case, model) + _merged_sums(attack, case, _rounded_in_training(rng, case))


def _merged_sums(attack: Attack, case: Case, model: Model) -> list[Comparison]:
    with _folder() as parent:
        _save(attack, case, model, parent)
        _merge(attack, case, model, parent)
        stored, head = load_file(parent / "merged" / WEIGHTS), load_file(parent / "merged" / HEAD)
        config, base = (json.loads((parent / name / CONFIG).read_text()) for name in ("merged", "base"))
    found = _same_tensors({name: model.trainable[name] for name in ("score.weight", "score.bias")}, head)
    found += [_equal(f"{CONFIG}: {key}", value, config.get(key)) for key, value in base.items()]
    paths = {f"{path}.weight" for path in projections(model)}
    found += _same_tensors({name: value for name, value in model.decoder.items() if name not in paths}, _without(stored, paths))
    return found + [_sum(model, name, stored.get(name)) for name in sorted(paths)]


def merged_gives_the_logits(attack: Attack, case: Case) -> list[Comparison]:
    """The subject's logits of the merged checkpoint against the reference's of the unmerged classifier, within the noise of merging.

    One of the classifiers was trained on NF4 codes of weights in bfloat16, and its checkpoint is in float32.
    """
    found = []
    for model in (*_models(case), _rounded_in_training(generator_for(case.seed, "rounded"), case)):
        whole = _classifier(case, model)
        expected = attack.expect(whole)
        with _folder() as parent:
            _save(attack, case, model, parent)
            _merge(attack, case, model, parent)
            actual = attack.answer(case, scalars={"folder": str(parent / "merged"), **model.tokens()})
        found += _within_noise(attack, whole, expected, actual, _as_computed(model, merge=True))
    return found


def saved_checkpoint_is_exact(attack: Attack, case: Case) -> list[Comparison]:
    """A checkpoint written here, loaded and saved by the subject: the file's tensors by NumPy, the loaded ones, and the architecture."""
    rng = generator_for(case.seed, "model")
    model = generated(rng, case.seed, str(rng.choice(["float32", "bfloat16"])))
    with _folder() as parent:
        scalars = {"base": str(model.write_checkpoint(parent / "base")), "folder": str(parent / "copy")}
        answer = attack.answer(case, scalars=scalars)
        stored, config = load_file(parent / "copy" / WEIGHTS), json.loads((parent / "copy" / CONFIG).read_text())
        base = json.loads((parent / "base" / CONFIG).read_text())
    found = _same_tensors(model.decoder, stored)
    found += [_equal(f"{CONFIG}: {key}", value, config.get(key)) for key, value in base.items() if key != "pad_token_id"]
    loaded = {name: value.astype(np.float32) for name, value in model.decoder.items()}
    return found + _same_tensors(loaded, _group(answer, "parameters/"))


def interrupted_save_leaves_a_whole_adapter(attack: Attack, case: Case) -> list[Comparison]:
    """Over an adapter that is there: killed at a random step the folder is the old one or the new one, without room on disk the old one."""
    rng = generator_for(case.seed, "interruption")
    model = generated(rng, case.seed, "float32")
    found = []
    with _folder() as parent:
        _save(attack, case, model, parent)
        old = _content(parent / "adapter")
        changed = {name: value + np.float32(1.0) for name, value in model.trainable.items()}
        scalars = _places(model, parent) | {"folder": str(parent / "adapter")}
        new = parent / "new.safetensors"
        other = Model(model.scalars, model.dtype, model.decoder, changed, model.input_ids, model.mask)
        # Another alpha and pooling as well, so that every file of the new adapter differs from the old one's.
        scalars |= {"trainable": str(other.write_trainable(new)), "alpha": 2 * model.scalars["alpha"]}
        scalars["pooling"] = "last" if model.scalars["pooling"] == "mean" else "mean"
        attack.answer(case, operation="save_adapter", scalars={**scalars, "folder": str(parent / "wanted")})
        wanted = _content(parent / "wanted")
        size = sum(len(value) for name, value in old.items() if name == ADAPTER_WEIGHTS)
        for limit in (0, int(rng.integers(1, size))):
            attack.answer(case, scalars={**scalars, "limit": limit})
            found.append(_whole(f"files limited to {limit} of {size} bytes", _content(parent / "adapter"), [old]))
            found.append(_equal("what a failed save leaves beside", [], _hidden(parent)))
        for at in sorted(int(step) for step in rng.choice(14, 5, replace=False)):
            attack.answer(case, scalars={**scalars, "at": at})
            found.append(_whole(f"killed at step {at}", _content(parent / "adapter"), [old, wanted]))
    return found


def _models(case: Case) -> list[Model]:
    """The shipped checkpoint and a small random one."""
    rng = generator_for(case.seed, "model")
    return [shipped(rng, case.seed), generated(rng, case.seed, "float32")]


def _rounded_in_training(rng: Generator, case: Case) -> Model:
    """A small random one in float32 that was trained in bfloat16 on NF4, whose codes and absmax are those of the rounded weights."""
    return replace(generated(rng, case.seed, "float32", nf4=True), trained_in="bfloat16")


def _classifier(case: Case, model: Model) -> Case:
    return Case("classifier_forward", "float32", {}, model.scalars, case.seed, case.flavour, model.inputs())


def _places(model: Model, parent: Path) -> dict[str, Any]:
    """The checkpoint, written where it is not there yet, and the adaptation, as scalars of a procedure."""
    base = parent / "base"
    return {"base": str(base if base.exists() else model.write_checkpoint(base)), **model.settings()}


def _save(attack: Attack, case: Case, model: Model, parent: Path) -> None:
    scalars = _places(model, parent) | {"trainable": str(model.write_trainable(parent / "trainable.safetensors"))}
    attack.answer(case, operation="save_adapter", scalars={**scalars, "folder": str(parent / "adapter")})


def _merge(attack: Attack, case: Case, model: Model, parent: Path) -> None:
    places = {"base": str(parent / "base"), "folder": str(parent / "adapter"), "merged": str(parent / "merged")}
    places |= {"trained_in": model.trained_in} if model.trained_in else {}
    attack.answer(case, operation="merge_adapter", scalars=places)


def _within_noise(attack: Attack, whole: Case, expected: Mapping[str, Array], actual: Mapping[str, Array], run: Run) -> list[Comparison]:
    return attack.judge(expected, actual, lambda: attack.floor(whole, run, expected), {"logits": STORAGE["float32"]})


def _as_computed(model: Model, merge: bool) -> Run:
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
        return reference.evaluate("classifier_forward", values, {**model.scalars, "nf4": False}, table)

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
    bound = unit * np.abs(exact) + (1 + unit) * single * (np.abs(weight) + np.abs(exact) + (scalars["rank"] + 2) * size) + 2.0**-120
    return compare(f"{name} / bound", exact / bound, np.asarray(merged, np.float64) / bound, Errors.flat(1.0), unit)


def _same_tensors(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> list[Comparison]:
    """Names, shapes, dtypes and bits."""
    found = [broken(name, "an extra tensor") for name in sorted(set(actual) - set(expected))]
    for name, value in expected.items():
        if name not in actual:
            found.append(broken(name, "missing"))
        elif actual[name].dtype != value.dtype:
            found.append(broken(name, "dtype", str(value.dtype), str(actual[name].dtype)))
        else:
            found.append(compare_exactly(name, value, actual[name]))
    return found


def _equal(name: str, expected: Any, actual: Any) -> Comparison:
    if expected == actual:
        return Comparison(name, True, 0.0, "exact", error=0.0, limit=0.0)
    return broken(name, "another value", str(expected), str(actual))


def _sorted(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def _group(answer: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in answer.items() if name.startswith(prefix)}


def _without(tensors: Mapping[str, Array], names: set[str]) -> dict[str, Array]:
    return {name: value for name, value in tensors.items() if name not in names}


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def _hidden(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir() if path.name.startswith("."))


def _whole(name: str, content: dict[str, bytes], accepted: list[dict[str, bytes]]) -> Comparison:
    if content in accepted:
        return Comparison(name, True, 0.0, "exact", error=0.0, limit=0.0)
    sizes = {file: len(value) for file, value in content.items()}
    return broken(name, "half an adapter", str({file: len(value) for file, value in accepted[0].items()}), str(sizes))
