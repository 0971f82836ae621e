"""Adapters that must be refused: damaged, of another architecture, or of another method than plain LoRA."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from blackswan.falsifiers.numeric.attack import Attack
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.checks.refusals import refusal, truncate
from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.numeric.generators import Generator, generator_for
from blackswan.falsifiers.system.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BESIDE, CONFIG, PREFIX, Model, generated
from blackswan.reference.table import Array

Damage = Callable[[Path, Generator], str]
"""Damages a folder and returns what the message must name (a regular expression)."""


def _config(key: str, value: Any) -> Damage:
    def damage(folder: Path, rng: Generator) -> str:
        del rng
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        (folder / ADAPTER_CONFIG).write_text(json.dumps({**config, key: value}))
        return f"{ADAPTER_CONFIG}.*{key}"

    return damage


def _another_rank(folder: Path, rng: Generator) -> str:
    rank = json.loads((folder / ADAPTER_CONFIG).read_text())["r"]
    _config("r", rank + 1)(folder, rng)
    return f"{ADAPTER_WEIGHTS}.*lora_"


def _fewer_targets(folder: Path, rng: Generator) -> str:
    _config("target_modules", ["q_proj"])(folder, rng)
    return f"{ADAPTER_WEIGHTS}.*unexpected"


def _tensors(change: Callable[[dict[str, Array], str], str], of: str = "lora_") -> Damage:
    def damage(folder: Path, rng: Generator) -> str:
        tensors = load_file(folder / ADAPTER_WEIGHTS)
        names = sorted(name for name in tensors if of in name)
        named = change(tensors, names[int(rng.integers(len(names)))])
        save_file(tensors, folder / ADAPTER_WEIGHTS)
        return f"{ADAPTER_WEIGHTS}.*{named}"

    return damage


def _missing(tensors: dict[str, Array], name: str) -> str:
    del tensors[name]
    return name.removeprefix(PREFIX)


def _surplus(tensors: dict[str, Array], name: str) -> str:
    tensors[name.replace("lora_", "surplus_")] = tensors[name]
    return "surplus"


def _unprefixed(tensors: dict[str, Array], name: str) -> str:
    tensors[name.removeprefix(PREFIX)] = tensors.pop(name)
    return name.removeprefix(PREFIX)


def _misshapen(tensors: dict[str, Array], name: str) -> str:
    tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])
    return name.removeprefix(PREFIX)


def _integers(tensors: dict[str, Array], name: str) -> str:
    tensors[name] = tensors[name].astype(np.int32)
    return name


def _not_finite(tensors: dict[str, Array], name: str) -> str:
    tensors[name].reshape(-1)[-1] = np.nan
    return name


def _infinite(tensors: dict[str, Array], name: str) -> str:
    tensors[name].reshape(-1)[0] = np.inf
    return name


def _removed(file: str) -> Damage:
    def damage(folder: Path, rng: Generator) -> str:
        del rng
        (folder / file).unlink()
        return file

    return damage


def _truncated(file: str) -> Damage:
    def damage(folder: Path, rng: Generator) -> str:
        truncate(folder / file, rng)
        return file

    return damage


DAMAGE: dict[str, Damage] = {
    "no config": _removed(ADAPTER_CONFIG),
    "no weights": _removed(ADAPTER_WEIGHTS),
    "truncated config": _truncated(ADAPTER_CONFIG),
    "truncated weights": _truncated(ADAPTER_WEIGHTS),
    "missing factor": _tensors(_missing),
    "missing head": _tensors(_missing, "score.weight"),
    "surplus tensor": _tensors(_surplus),
    "tensor without the prefix": _tensors(_unprefixed),
    "misshapen factor": _tensors(_misshapen),
    "misshapen head": _tensors(_misshapen, "score.weight"),
    "integer factor": _tensors(_integers),
    "NaN in a factor": _tensors(_not_finite),
    "infinite head": _tensors(_infinite, "score."),
    "rank that the tensors do not have": _another_rank,
    "fewer targets than tensors": _fewer_targets,
    "rank as text": _config("r", "8"),
    "rank zero": _config("r", 0),
    "no alpha": _config("lora_alpha", None),
    "alpha zero": _config("lora_alpha", 0),
    "unknown target": _config("target_modules", ["q_proj", "v_prj"]),
    "targets as a pattern": _config("target_modules", ".*_proj"),
    "no head": _config("modules_to_save", None),
    "more than the head": _config("modules_to_save", ["score", "embed_tokens"]),
    "another method": _config("peft_type", "IA3"),
    "another task": _config("task_type", "CAUSAL_LM"),
    "rsLoRA": _config("use_rslora", True),
    "DoRA": _config("use_dora", True),
    "ranks by module": _config("rank_pattern", {"q_proj": 2}),
    "alphas by module": _config("alpha_pattern", {"q_proj": 2}),
    "trained biases": _config("bias", "all"),
    "biases of B": _config("lora_bias", True),
    "chosen layers": _config("layers_to_transform", [0]),
    "transposed weights": _config("fan_in_fan_out", True),
    "base changed by the initialisation": _config("init_lora_weights", "pissa"),
    "a key of a later version, on": _config("use_something_new", True),
}


def refuses_adapter(attack: Attack, case: Case) -> list[Comparison]:
    """One adapter of PEFT's, each damage in turn, and bases that it was not trained on; the message names file and key."""
    rng = generator_for(case.seed, "damage")
    model = generated(rng, case.seed, "float32", nf4=False, layers=2, targets="q_v")
    found = []
    with tempfile.TemporaryDirectory() as parent:
        base = str(model.write_checkpoint(Path(parent) / "base"))
        for number, (name, damage) in enumerate(DAMAGE.items()):
            folder = model.write_peft(Path(parent) / f"adapter{number}")
            message = damage(folder, rng)
            before = _content(folder)
            found.append(_named(name, attack, case, {"folder": str(folder), "base": base}, message))
            if _content(folder) != before:
                found.append(broken(name, "the folder was changed"))
        found += _other_bases(attack, case, model, Path(parent))
    return found


def _other_bases(attack: Attack, case: Case, model: Model, parent: Path) -> list[Comparison]:
    """PEFT's adapters show another base by the shapes, ours by any number of the architecture."""
    theirs = str(model.write_peft(parent / "theirs"))
    ours = str(parent / "ours")
    trainable = str(model.write_trainable(parent / "trainable.safetensors"))
    own = {"folder": ours, "base": str(parent / "base"), "trainable": trainable, **model.settings()}
    attack.answer(case, operation="save_adapter", scalars=own)
    found = []
    for key, folder, message in (
        ("num_hidden_layers", theirs, f"{ADAPTER_WEIGHTS}.*lora_"),
        ("hidden_size", theirs, f"{ADAPTER_WEIGHTS}.*(lora_|score)"),
        ("rms_norm_eps", ours, f"{BESIDE}.*eps"),
        ("rope_theta", ours, f"{BESIDE}.*theta"),
        ("intermediate_size", ours, f"{BESIDE}.*intermediate"),
    ):
        other = parent / f"base of another {key}"
        other.mkdir()
        config = json.loads((parent / "base" / CONFIG).read_text())
        (other / CONFIG).write_text(json.dumps({**config, key: config[key] * 2}))
        found.append(_named(f"another {key}", attack, case, {"folder": folder, "base": str(other)}, message))
    return found


def _named(name: str, attack: Attack, case: Case, scalars: dict[str, str], message: str) -> Comparison:
    return replace(refusal(lambda: attack.answer(case, scalars=scalars), "Exception", message), tensor=name)


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
