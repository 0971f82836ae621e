"""Classifiers as files, written and read without `impl`: Hugging Face checkpoints, adapters as PEFT writes them, through NumPy and JSON."""

import json
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from blackswan.falsifiers.data import CHECKPOINT, CORPUS_HELDOUT
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import STORAGE
from blackswan.falsifiers.numeric.strategies import parameters
from blackswan.falsifiers.runner.real_input import RealInput
from blackswan.falsifiers.subjects.doors.files import AdapterSettings
from blackswan.falsifiers.system import config_files
from blackswan.falsifiers.system.workloads import through_nf4
from blackswan.reference.classifier import projections as targeted
from blackswan.reference.classifier import trainable_names
from blackswan.reference.decoder import parameter_shapes
from blackswan.reference.table import Array

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS, BESIDE, HEAD = "adapter_config.json", "adapter_model.safetensors", "blackswan.json", "head.safetensors"
PREFIX = "base_model.model."
CLASSES = 5
PEFT_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("alora_invocation_tokens", "arrow_config", "auto_mapping", "corda_config", "eva_config", "exclude_modules")),
    **dict.fromkeys(("kasa_config", "layer_replication", "layers_pattern", "layers_to_transform", "lora_ga_config", "megatron_config")),
    **dict.fromkeys(("monteclora_config", "revision", "target_parameters", "trainable_token_indices", "use_bdlora", "velora_config")),
    **dict.fromkeys(("ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora"), False),
    **{"alpha_pattern": {}, "rank_pattern": {}, "loftq_config": {}, "bias": "none", "inference_mode": True, "init_lora_weights": True},
    **{"lora_dropout": 0.05, "megatron_core": "megatron.core", "peft_version": "0.21.2", "qalora_group_size": 16},
}
"""PEFT 0.21 writes these keys besides those of the adapter itself."""

OF_EARLIER_PEFT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
        *("layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r", "revision", "target_modules"),
        "task_type",
    )
)
"""PEFT 0.4 writes no other keys."""


@dataclass(frozen=True)
class Model:
    """A classifier: scalars of `classifier_forward`, its decoder as a checkpoint holds it in `dtype`, LoRA and head in float32, a batch.

    `trained_in` is the dtype in which training had the weights when it quantised them, where that is not `dtype`; `config` is what
    config.json says, where it is not the plain spelling.
    """

    scalars: dict[str, Any]
    dtype: str
    decoder: dict[str, Array]
    trainable: dict[str, Array]
    input_ids: Array
    mask: Array
    trained_in: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> AdapterSettings:
        """The adaptation."""
        return AdapterSettings(**{name: self.scalars[name] for name in AdapterSettings.__dataclass_fields__})

    def inputs(self) -> dict[str, Array]:
        """The inputs of `classifier_forward`, in float64."""
        given = self.decoder | {f"{path}.weight": before_nf4(self, path) for path in projections(self)} | self.trainable
        named = {f"parameters/{name}": np.asarray(value, np.float64) for name, value in given.items()}
        return {"input_ids": self.input_ids, "mask": self.mask, **named}

    def write_checkpoint(self, folder: Path) -> Path:
        """The decoder as a Hugging Face checkpoint."""
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(json.dumps(self.config or config_files.plain(self.scalars)))
        save_file(self.decoder, folder / WEIGHTS)
        return folder

    def write_peft(
        self,
        folder: Path,
        dtypes: Mapping[str, Any] | None = None,
        head_bias: bool = True,
        parts: int = 1,
        known: Collection[str] | None = None,
        **said: Any,
    ) -> Path:
        """An adapter as PEFT writes it, its targets by so many last parts of their paths or, for 0, all, each tensor in its own of `dtypes`
        or all in float32.

        PEFT has no head bias where the model has none.

        `said` are other values of keys of its configuration, which has those alone that are `known`, or all.
        """
        folder.mkdir(parents=True)
        chosen = {name: value for name, value in self.trainable.items() if head_bias or name != "score.bias"}
        save_file(
            {PREFIX + name: value.astype(dtypes[name] if dtypes else np.float32, order="C") for name, value in chosen.items()},
            folder / ADAPTER_WEIGHTS,
        )
        own = {"peft_type": "LORA", "task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
        own |= {"r": self.scalars["rank"], "lora_alpha": self.scalars["alpha"], "base_model_name_or_path": "a/model"}
        adapted = [path.split(".") for path in projections(self) if path.endswith(target_modules(self))]
        own["target_modules"] = sorted({".".join(path[-parts:]) for path in adapted})
        written = {key: value for key, value in (PEFT_DEFAULTS | own | said).items() if known is None or key in known}
        (folder / ADAPTER_CONFIG).write_text(json.dumps(written))
        return folder


def generated(rng: Generator, seed: int, dtype: str, **fixed: Any) -> Model:
    """A small classifier of any family, its config.json in any spelling; `fixed` are scalars that are not drawn.

    Its rotary frequencies are scaled or not, unless `factor` is fixed.
    """
    kv_heads, groups, hidden = int(rng.integers(1, 3)), int(rng.integers(1, 3)), int(rng.choice([16, 32]))
    scalars = {
        "family": str(rng.choice(["llama", "qwen2", "qwen3"])),
        "vocab": 32,
        "hidden": hidden,
        "intermediate": int(rng.choice([24, 48])),
        "layers": int(rng.integers(1, 3)),
        "heads": kv_heads * groups,
        "kv_heads": kv_heads,
        "head_dim": int(rng.choice([8, 16, *[hidden // (kv_heads * groups)] * 2])),
        "eps": float(rng.choice([1.0000123456789012e-05, 1e-6])),
        "theta": float(rng.choice([1e4, 1e6 + 1 / 3])),
        "tied": bool(rng.integers(2)),
        **(config_files.SCALED if rng.integers(2) else {"factor": 1.0}),
        **_adaptation(rng),
        **fixed,
    }
    if scalars["family"] == "qwen3" and "head_dim" not in fixed and rng.integers(3) == 0:
        scalars["head_dim"] = config_files.QWEN3_HEAD_DIM
    lengths = rng.integers(2, 9, 3)
    input_ids, mask = rng.integers(0, 32, (3, int(lengths.max()))), np.arange(int(lengths.max())) < lengths[:, None]
    if rng.integers(2):
        input_ids, mask = input_ids[:, ::-1].copy(), mask[:, ::-1].copy()
    return replace(_filled(scalars, seed, dtype, None, input_ids, mask), config=config_files.spelled(rng, scalars))


def shipped(rng: Generator, seed: int, **fixed: Any) -> Model:
    """The shipped checkpoint with an adapter of random numbers, and two samples of held-out text."""
    real = _real()
    scalars = {**real.scalars, **_adaptation(rng), "classes": CLASSES, **fixed}
    rows = [real.rows[int(index)][0][:24] for index in rng.integers(0, len(real.rows), 2)]
    longest = max(len(row) for row in rows)
    input_ids = np.array([row + [0] * (longest - len(row)) for row in rows])
    mask = np.arange(longest) < np.array([len(row) for row in rows])[:, None]
    return _filled(scalars, seed, "float32", load_file(CHECKPOINT / WEIGHTS), input_ids, mask)


@cache
def _real() -> RealInput:
    return RealInput(CHECKPOINT, CORPUS_HELDOUT)


def _adaptation(rng: Generator) -> dict[str, Any]:
    rank = int(rng.integers(1, 5))
    return {
        "classes": int(rng.integers(2, 6)),
        "rank": rank,
        "alpha": float(rank * rng.choice([0.25, 2.0, 2.7 + 2.0**-20])),
        "targets": str(rng.choice(["q_v", "all", "k_proj+down_proj"])),
        "pooling": str(rng.choice(["mean", "last", "first"])),
        "nf4": bool(rng.integers(2)),
        "double_quantize": bool(rng.integers(2)),
    }


def _filled(scalars: dict[str, Any], seed: int, dtype: str, decoder: dict[str, Array] | None, input_ids: Array, mask: Array) -> Model:
    scalars = {**scalars, "double_quantize": scalars["nf4"] and scalars["double_quantize"]}
    drawn = {name.removeprefix("parameters/"): value for name, value in parameters("classifier", scalars, "normal", seed, dtype).items()}
    names = trainable_names(scalars)
    trainable = {name: drawn[name].astype(np.float32) for name in names}
    held = {name: drawn[name].astype(STORAGE[dtype]) for name in parameter_shapes(scalars)} if decoder is None else decoder
    return Model(scalars, dtype, held, trainable, input_ids, mask)


def read_adapter(folder: Path, scalars: Mapping[str, Any]) -> dict[str, Array]:
    """LoRA and head of an adapter by their plain names, B times what adapter_config.json makes of the scale over `scalars`' own.

    So the logits of the reference depend on rank and alpha of the file, whatever was asked for. KeyError for a name without PEFT's prefix.
    """
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    scale = (config["lora_alpha"] / config["r"]) / (scalars["alpha"] / scalars["rank"])
    tensors = {name.removeprefix(PREFIX): np.asarray(value, np.float64) for name, value in load_file(folder / ADAPTER_WEIGHTS).items()}
    return {name: value * scale if name.endswith("lora_B.weight") else value for name, value in tensors.items()}


def before_nf4(model: Model, path: str) -> Array:
    """The projection's weight as training quantised it, or as it is stored where training did not."""
    stored = model.decoder[f"{path}.weight"]
    return stored.astype(STORAGE[model.trained_in]) if model.scalars["nf4"] and model.trained_in else stored


def base_weight(model: Model, path: str) -> Array:
    """The projection's weight as the classifier computes with it: through NF4 and back where the model is quantised."""
    weight = np.asarray(before_nf4(model, path), np.float64)
    if not model.scalars["nf4"]:
        return weight
    return np.asarray(through_nf4(weight, model.scalars["double_quantize"]), np.float64)


def target_modules(model: Model) -> tuple[str, ...]:
    """The names of the projections that the adapter updates."""
    return tuple(name.rpartition(".")[2] for name in targeted(model.scalars["targets"]))


def one_ulp_off(tensor: Array) -> None:
    """Makes one element of a tensor, anywhere in it, the next number that its dtype has."""
    flat = tensor.reshape(-1)
    place = zlib.crc32(tensor.tobytes()) % flat.size
    flat[place : place + 1] = np.nextafter(flat[place : place + 1], np.array(np.inf, tensor.dtype))


def projections(model: Model) -> list[str]:
    """The paths of the seven projections of every layer."""
    return [name.removesuffix(".weight") for name in model.decoder if name.endswith("_proj.weight")]
