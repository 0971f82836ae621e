"""Damaged files and impossible devices: each must be refused with a word of its cause."""

import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.refusals import refusal, truncate
from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.reference.table import Array

Damage = Callable[[Path, Generator], None]
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


def _truncated(file: str) -> Damage:
    def damage(folder: Path, rng: Generator) -> None:
        truncate(folder / file, rng)

    return damage


def _header_length(folder: Path, rng: Generator) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", int(rng.integers(2**40, 2**60))) + content[8:])


def _tensors(change: Callable[[dict[str, Array], str], None]) -> Damage:
    def damage(folder: Path, rng: Generator) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors, sorted(tensors)[int(rng.integers(len(tensors)))])
        save_file(tensors, folder / WEIGHTS)

    return damage


def _missing(tensors: dict[str, Array], name: str) -> None:
    del tensors[name]


def _surplus(tensors: dict[str, Array], name: str) -> None:
    tensors["model.layers.0.self_attn.surplus.weight"] = tensors[name]


def _misshapen(tensors: dict[str, Array], name: str) -> None:
    tensors[name] = np.ascontiguousarray(tensors[name][:-1])


def _integers(tensors: dict[str, Array], name: str) -> None:
    tensors[name] = tensors[name].astype(np.int32)


def _config(**changes: Any) -> Damage:
    def damage(folder: Path, rng: Generator) -> None:
        del rng
        config = json.loads((folder / CONFIG).read_text()) | changes
        (folder / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return damage


def _removed(file: str) -> Damage:
    def damage(folder: Path, rng: Generator) -> None:
        del rng
        (folder / file).unlink()

    return damage


CHECKPOINT_DAMAGE: dict[str, tuple[Damage, str]] = {
    "truncated safetensors": (_truncated(WEIGHTS), WEIGHTS),
    "corrupt safetensors header": (_header_length, WEIGHTS),
    "missing tensor": (_tensors(_missing), "model\\."),
    "surplus tensor": (_tensors(_surplus), "surplus"),
    "misshapen tensor": (_tensors(_misshapen), "model\\."),
    "integer tensor": (_tensors(_integers), "model\\.|" + WEIGHTS),
    "encoder": (_config(model_type="bert", architectures=["BertForSequenceClassification"]), "decoder|encoder"),
    "unknown model type": (_config(model_type="mystery"), "model_type"),
    "no hidden size": (_config(hidden_size=None), "hidden_size"),
    "hidden size as text": (_config(hidden_size="many"), "hidden_size"),
    "fewer layers than stored": (_config(num_hidden_layers=1), "model\\.layers"),
    "truncated config": (_truncated(CONFIG), CONFIG),
    "no config": (_removed(CONFIG), CONFIG),
    "no weights": (_removed(WEIGHTS), WEIGHTS),
}
TOKENIZER_DAMAGE: dict[str, tuple[Damage, str]] = {
    "no tokenizer": (_removed(TOKENIZER), TOKENIZER),
    "truncated tokenizer": (_truncated(TOKENIZER), TOKENIZER),
}


def refuses_checkpoint(attack: Attack, case: Case) -> list[Comparison]:
    """One damage a case; the message names the file or the key."""
    return _refuses_folder(attack, case, CHECKPOINT_DAMAGE)


def refuses_tokenizer(attack: Attack, case: Case) -> list[Comparison]:
    """Without tokenizer.json, or with a part of it."""
    return _refuses_folder(attack, case, TOKENIZER_DAMAGE)


def _refuses_folder(attack: Attack, case: Case, damages: dict[str, tuple[Damage, str]]) -> list[Comparison]:
    rng = generator_for(case.seed, "damage")
    found = []
    for name, (damage, message) in damages.items():
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "checkpoint"
            shutil.copytree(CHECKPOINT, folder)
            damage(folder, rng)
            before = _listing(folder)
            found.append(_named(name, refusal(lambda path=folder: attack.answer(case, scalars={"path": str(path)}), "Exception", message)))  # type: ignore[misc]  # the default binds the folder
            if _listing(folder) != before:
                found.append(broken(name, "the folder was changed"))
    return found


def _listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path.relative_to(folder)), path.stat().st_size) for path in folder.rglob("*"))


def refuses_device(attack: Attack, case: Case) -> list[Comparison]:
    """Names outside the grammar; and CUDA where there is none."""
    names = ["", "gpu", "cuda:16", "cuda:-1", "cuda:", "CUDA", "cpu:0", "cuda:01", "cuda:0x1", " cpu", "auto:0", "mps"]
    if attack.subject.device == "cpu":
        names += ["cuda", "cuda:0"]
    return [
        _named(repr(name), refusal(lambda name=name: attack.answer(case, scalars={"name": name}), "Exception", "device"))  # type: ignore[misc]  # the default binds the name
        for name in names
    ]


def _named(name: str, comparison: Comparison) -> Comparison:
    return Comparison(**{**vars(comparison), "tensor": name})


def checkpoint_arrives_exactly(attack: Attack, case: Case) -> list[Comparison]:
    """Every tensor of the file against the loaded one, bit for bit, and no other tensor."""
    answer = attack.answer(case, scalars={"path": str(CHECKPOINT)})
    stored = {f"parameters/{name}": value for name, value in load_file(CHECKPOINT / WEIGHTS).items()}
    extra = sorted(set(answer) - set(stored))
    found = [broken(name, "not in the file") for name in extra]
    for name, value in stored.items():
        if name not in answer:
            found.append(broken(name, "in the file, but not loaded"))
        else:
            found.append(compare_exactly(name, value, answer[name]))
    return found
