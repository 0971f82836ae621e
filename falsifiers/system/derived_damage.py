"""Damages that are derived from a whole folder: each form of its JSON, each key, each tensor; and what they are judged by."""

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.system.adapter_files import (
    TOKENIZER,
    WEIGHTS,
    Model,
    generated,
    one_ulp_off,
)
from blackswan.falsifiers.system.command_problem import tokenizer
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array

ABSENT = object()
TOKENIZER_CONFIG = "tokenizer_config.json"
TEXTS = ["rm -rf /", "ls"]
SETTINGS: dict[str, Any] = {"num_classes": 3, "lora_rank": 2, "lora_alpha": 3.0, "max_seq_len": 8, "pooling": "last", "seed": 3}
UNREAD = "lm_head.weight"
Values = dict[str, Any]


@dataclass(frozen=True)
class Damage:
    """Files of a folder with other content, None for one that is removed, a path for one that is a link to there, and what the refusal
    names (a regular expression).

    A `free` one may also change nothing: it is refused, or the answer is that of the whole folder. Of `taken` ones nothing is refused,
    and what is both changes nothing.
    """

    name: str
    files: Mapping[str, bytes | Path | None]
    named: str
    free: bool = False
    taken: bool = False


def judged(trial: Trial, folder: Path, damages: Iterable[Damage], ask: Callable[[], object]) -> Iterator[Comparison]:
    """The answers with each damage in turn; the folder is left as it is."""
    stored, whole = content(folder), ask()
    for damage in damages:
        for file, changed in damage.files.items():
            (folder / file).unlink(missing_ok=True)  # the file may be mapped
            if isinstance(changed, Path):
                (folder / file).symlink_to(changed)
            elif changed is not None:
                (folder / file).write_bytes(changed)
        before = content(folder)
        if damage.free or damage.taken:
            yield from _harmless(damage, whole, ask)
        else:
            yield trial.refuses(damage.name, ask, f"(?s){damage.named}", "ValueError|OSError")
        if content(folder) != before:
            yield broken(damage.name, "the folder was changed")
        for file in damage.files:
            (folder / file).unlink(missing_ok=True)
            if file in stored:
                (folder / file).write_bytes(stored[file])


def _harmless(damage: Damage, whole: object, ask: Callable[[], object]) -> Iterator[Comparison]:
    try:
        found = ask()
    except SubjectError as error:
        if damage.taken or not isinstance(error.__cause__, ValueError | OSError):
            yield broken(damage.name, "refused", "an answer", str(error))
        return
    if damage.free or not damage.taken:
        yield from same(f"answer with {damage.name}", whole, found)


def forms(folder: Path, file: str, rng: Generator) -> Iterator[Damage]:
    """Files that are no JSON object with one value a key; the refusal names the file, and the key where there is one."""
    whole = (folder / file).read_bytes()
    key, value = next(iter(json.loads(whole).items()))
    written: dict[str, tuple[bytes, str]] = {
        "a byte order mark": (b"\xef\xbb\xbf" + whole, "byte order mark"),
        "UTF-16": (whole.decode().encode("utf-16"), ""),
        "no object": (b"[]", ""),
        "an end too early": (whole[: int(rng.integers(0, len(whole.rstrip())))], ""),
        "a key twice": (b"{" + f"{json.dumps(key)}: {json.dumps(value)},".encode() + whole[1:], f"{key}.*twice"),
        "a key twice within": (b'{"surplus": {"a": 1, "a": 2},' + whole[1:], "'a' is given twice"),
        "a second object": (whole.rstrip() + b"{}", ""),
        "a second object behind a blank": (whole.rstrip() + b" \n {}", ""),
        "NaN": (b'{"surplus": NaN,' + whole[1:], "NaN"),
        "ten thousand brackets": (b'{"surplus": ' + 10_000 * b"[" + 10_000 * b"]" + b"," + whole[1:], "deep"),
    }
    for name, (changed, named) in written.items():
        yield Damage(f"{file} with {name}", {file: changed}, f"{file}.*{named}")
    yield Damage(f"{file} between blanks and lines", {file: b" \n\t\r\n" + whole + b"\n \n"}, "", taken=True)


def edited(folder: Path, file: str, changes: Mapping[str, Any], named: str = "", *, seal: bool = False, **kind: bool) -> Damage:
    """Other values of keys, dotted where they are nested; `seal` gives a blackswan.json the digest that fits them."""
    values: Values = json.loads((folder / file).read_text())
    for path, value in changes.items():
        *parents, key = path.split("/")
        place = values
        for parent in parents:
            place = place[parent]
        if value is ABSENT:
            place.pop(key, None)
        else:
            place[key] = value
    if seal:
        said = {key: value for key, value in values.items() if key != "digest"}
        values["digest"] = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    shown = ", ".join(f"{path} {'removed' if value is ABSENT else f'= {str(value)[:40]}'}" for path, value in changes.items())
    told = named or f"{file}.*{next(iter(changes)).rpartition('/')[2]}"
    return Damage(f"{file}: {shown}{', sealed' if seal else ''}", {file: json.dumps(values).encode()}, told, **kind)


def other_types(value: Any) -> list[Any]:
    """Values of other types than a JSON value's own."""
    others: list[Any] = ["many", [1.5], True, {"a": 1}]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return [one for one in others if type(one) is not type(value)] + ([] if number else [7, 0.5])


def another(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1 if isinstance(value, int) else math.nextafter(value, math.inf)
    if isinstance(value, str):
        return value + "x"
    return [*value, "x"] if isinstance(value, list) else {**value, "x": 1} if isinstance(value, dict) else "x"


def tensors(folder: Path, file: str, prefix: str, rng: Generator) -> Iterator[Damage]:
    """Each tensor with one drawn damage; the refusal names file and tensor."""
    whole = load((folder / file).read_bytes())
    for name in whole:
        kind = str(rng.choice(["missing", "misshapen", "of integers", "one ulp off", "not finite", "twice"]))
        changed, plain = copy.deepcopy(whole), name.removeprefix(prefix)
        value = changed.pop(name)
        if kind == "twice":
            changed |= {name: value, f"{name}.surplus": value}
        elif kind != "missing":
            changed[name] = _spoiled(value, kind)
        # A damage of a base's tensor is found where it is read, and NaN also by its path alone. A classifier reads no output layer.
        path = plain.rpartition(".")[0]
        named = f"({file}|{folder.name}).*{path}|{path}.*({folder.name})" if file == WEIGHTS else f"{file}.*{path}"
        yield Damage(f"{file}: {name} {kind}", {file: save(changed)}, named, free=name == UNREAD)


def _spoiled(value: Array, kind: str) -> Array:
    if kind == "misshapen":
        return np.ascontiguousarray(value[..., :-1])
    if kind == "of integers":
        return value.astype(np.int32)
    spoiled = value.copy()
    if kind == "not finite":
        spoiled.reshape(-1)[-1:] = np.nan
    else:
        one_ulp_off(spoiled)
    return spoiled


def small_base(trial: Trial, parent: Path) -> tuple[Path, Model]:
    """A small checkpoint with the shipped tokenizer."""
    family = ("llama", "qwen2", "qwen3")[trial.seed % 3]
    sizes: Values = {
        "layers": 2,
        "theta": 1e4,
        "targets": "q_v",
        "vocab": tokenizer().get_vocab_size(),
        "hidden": 16,
        "kv_heads": 1,
        "heads": 2,
        "head_dim": 8,
    }
    model = replace(generated(trial.rng("model"), trial.seed, "float32", nf4=False, family=family, factor=1.0, **sizes), config={})
    folder = model.write_checkpoint(parent / "base")
    shutil.copyfile(CHECKPOINT / TOKENIZER, folder / TOKENIZER)
    (folder / TOKENIZER_CONFIG).write_text(json.dumps({"pad_token": "<eos>", "model_max_length": 9}))
    return folder, model
