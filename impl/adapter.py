"""Adapters on disk in PEFT's format: adapter_config.json and adapter_model.safetensors, head included.

What PEFT's format has no place for lies beside them in blackswan.json: pooling, NF4, architecture of the base, settings of the run.

The Hugging Face classes for sequence classification pool the last token and have a head without a bias. PEFT drops a stored head bias
there without a word, so that the logits are off by it: `prepare_sequence_classifier` gives the model a head with a bias before PEFT
loads the adapter into it. Mean and first-token pooling have no Hugging Face counterpart; such an adapter is refused there.
"""

import dataclasses
import difflib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import skip_init

from blackswan.impl import strict_json
from blackswan.impl.checksums import Checksums, checksum, require
from blackswan.impl.classifier import Adaptation, trainable_shapes
from blackswan.impl.config import POOLINGS, TARGETS, DecoderConfig, target_modules, targets_named
from blackswan.impl.folder import is_there, whole_folder
from blackswan.impl.tensors import laid_out

ADAPTER_CONFIG, ADAPTER_WEIGHTS, BESIDE, HEAD = "adapter_config.json", "adapter_model.safetensors", "blackswan.json", "head.safetensors"
_WHOLE = re.compile(r"(pytorch_)?model(-.*)?\.(safetensors|bin)(\.index\.json)?|.*\.(apr|gguf)")  # files of a whole model's weights
PREFIX = "base_model.model."
HEAD_WEIGHT, HEAD_BIAS = "score.weight", "score.bias"
_BESIDE = {
    **{"transformers": str, "classes": int, "pooling": str, "nf4": bool},
    **{"architecture": dict, "extra": dict, "checksums": dict, "digest": str},
}
"""The keys that every blackswan.json has, and their types."""
_OPTIONAL = {"lora": dict, "double_quantize": bool}
"""That of an adapter has `lora` too, and `double_quantize` where the absmax of its NF4 base weights were quantised."""
# They say how training went, or from where, and nothing about what the adapter computes.
_IRRELEVANT = (
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "inference_mode", "lora_dropout", "peft_version", "revision"),
    *("megatron_core", "qalora_group_size", "runtime_config"),
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("SEQ_CLS", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # PiSSA, OLoRA and others change the base weights
}
_STOCK = (
    "The classes for sequence classification have no head bias and drop this one without a word: "
    "call blackswan.impl.adapter.prepare_sequence_classifier(model, folder) before PEFT loads the adapter, "
    "or on the model of a merged checkpoint."
)
_NO_STOCK = "No class for sequence classification pools by {pooling}: only Blackswan computes these logits."
MOST_ALPHA = 1e30
STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_READ = ("r", "lora_alpha", "target_modules", "modules_to_save")


@dataclass(frozen=True)
class Adapter:
    """A trained adaptation: its tensors by the names of `trainable_shapes`, the checkpoint that it was trained on, settings beside it.

    `base_checksums` are those of the checkpoint's tensors, where they are known.
    """

    adaptation: Adaptation
    trainable: dict[str, Tensor]
    base: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    base_checksums: Checksums = field(default_factory=dict)


def save_adapter(
    folder: Path,
    config: DecoderConfig,
    adaptation: Adaptation,
    trainable: Mapping[str, Tensor],
    *,
    base: Path | None,
    extra: Mapping[str, Any],
    base_checksums: Checksums | None = None,
) -> None:
    """Writes an adapter that `load_adapter` and PEFT read; an existing folder of that name is replaced as a whole.

    `trainable` are the tensors of `trainable_shapes(config, adaptation)`, stored in their dtype; `base` is the checkpoint's folder and
    `extra` what else is to come back, as JSON holds it. Raises a ValueError where the tensors are not the adaptation's, or where they, the
    adaptation or `extra` could not be read again (NaN, an infinity, another dtype, the keys 1 and "1" together), and a FileExistsError
    where `folder` holds something else than an adapter, or a checkpoint's weights beside it; nothing has changed then.
    """
    require_named(trainable_shapes(config, adaptation), trainable, str(folder))
    if folder.exists() and not (folder / ADAPTER_CONFIG).is_file():
        raise FileExistsError(f"{folder} exists and is no adapter (it has no {ADAPTER_CONFIG}); choose another name or move it away")
    if whole := next((each.name for each in sorted(folder.glob("*")) if _WHOLE.fullmatch(each.name)), None):
        raise FileExistsError(f"{folder} exists and has a checkpoint's {whole} beside an adapter, which would go too; choose another name")
    if not target_modules(adaptation.targets):
        raise ValueError(f"{folder}: the adaptation has no targets; PEFT's format needs at least one")
    _require_readable(folder, adaptation, trainable)
    with whole_folder(folder, replace=True) as partial:
        stored = {PREFIX + name: tensor for name, tensor in laid_out(trainable).items()}
        save_file(stored, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (partial / ADAPTER_CONFIG).write_text(json.dumps(_peft_config(adaptation, base), indent=2) + "\n")
        write_beside(partial / BESIDE, config, adaptation, extra, trainable, base_checksums)


def _require_readable(folder: Path, adaptation: Adaptation, trainable: Mapping[str, Tensor]) -> None:
    """Refuses what `load_adapter` would refuse to read, while there is something to be saved in its place."""
    settings = _PeftConfig(_peft_config(adaptation, None), folder / ADAPTER_CONFIG)
    settings.rank()
    settings.alpha()
    if adaptation.pooling not in POOLINGS:
        raise ValueError(f"{folder}: pooling is {adaptation.pooling!r}; expected one of {', '.join(POOLINGS)}")
    for name, tensor in trainable.items():
        _require_storable(name, tensor, folder / ADAPTER_WEIGHTS)


def load_adapter(folder: Path, config: DecoderConfig) -> Adapter:
    """The adapter of a folder, written by `save_adapter` or by PEFT for sequence classification, for a decoder of that architecture.

    An adapter of PEFT's own pools the last token, as the Hugging Face classes do; a head without a bias gets one of zeros. Raises a
    FileNotFoundError for a missing file, also for the blackswan.json of an adapter that `save_adapter` wrote, and a ValueError that names
    file and key for anything that is damaged, of another architecture, or computed otherwise than plain LoRA (DoRA, rsLoRA, ranks by
    module, …).
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected an adapter with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    values, tensors = read_object(folder / ADAPTER_CONFIG), read_tensors(folder / ADAPTER_WEIGHTS, PREFIX)
    settings = _PeftConfig(values, folder / ADAPTER_CONFIG)
    settings.refuse_unsupported()
    own = read_beside(folder / BESIDE, config) if _is_own(folder, values) else None
    head = tensors.get(HEAD_WEIGHT)
    if head is None or head.ndim != 2:
        raise ValueError(f"{folder / ADAPTER_WEIGHTS}: no matrix {PREFIX + HEAD_WEIGHT!r}; the head was not saved with the adapter")
    if HEAD_BIAS not in tensors and own is None:
        tensors[HEAD_BIAS] = torch.zeros(len(head), dtype=head.dtype, device="cpu")
    adaptation = Adaptation(
        classes=len(head) if own is None else own["classes"],
        rank=settings.rank(),
        alpha=settings.alpha(),
        targets=settings.targets(),
        pooling="last" if own is None else own["pooling"],
        nf4=False if own is None else own["nf4"],
        double_quantize=False if own is None else own.get("double_quantize", False),
    )
    require_named(trainable_shapes(config, adaptation), tensors, str(folder / ADAPTER_WEIGHTS))
    trainable = {name: tensors[name] for name in trainable_shapes(config, adaptation)}
    if own is None:
        return Adapter(adaptation, trainable, settings.base())
    kept = own["checksums"]
    require(trainable, kept["tensors"], str(folder / ADAPTER_WEIGHTS))
    for key in ("rank", "alpha", "targets"):
        here, there = getattr(adaptation, key), own.get("lora", {}).get(key)
        if here != there:
            raise ValueError(f"{folder}: {key} is {here!r} in {ADAPTER_CONFIG} and {there!r} in {BESIDE}; one was edited")
    return Adapter(adaptation, trainable, settings.base(), own["extra"], kept["base"])


def prepare_sequence_classifier(model: nn.Module, folder: Path) -> None:
    """Gives a transformers model for sequence classification the head of an adapter or a merged checkpoint, bias included.

    With an adapter, call it before PEFT loads the same folder; its head is then loaded by PEFT as well:

        model = AutoModelForSequenceClassification.from_pretrained(base)
        prepare_sequence_classifier(model, adapter)
        model = PeftModel.from_pretrained(model, adapter)

    `model.config.pad_token_id` must be the id that pads, and no text may end in it: that is how those classes find the last token.
    Raises a ValueError for another pooling than `last`, which those classes cannot compute, and for a model without a `score` layer of
    the head's width.
    """
    merged = folder / HEAD
    path, prefix = (merged, "") if merged.is_file() else (folder / ADAPTER_WEIGHTS, PREFIX)
    tensors = read_tensors(path, prefix)
    own = merged.is_file() or _is_own(folder, read_object(folder / ADAPTER_CONFIG))
    pooling = read_object(folder / BESIDE).get("pooling") if own else "last"
    if pooling != "last":
        raise ValueError(f"{folder / BESIDE}: pooling is {pooling!r}; transformers' classes pool the last token, they cannot compute it")
    weight, old = tensors.get(HEAD_WEIGHT), getattr(model, "score", None)
    if weight is None:
        raise ValueError(f"{path}: no tensor {HEAD_WEIGHT!r}; the head was not saved")
    bias = tensors.get(HEAD_BIAS, torch.zeros(weight.shape[:1], device="cpu"))
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        shapes = f"{HEAD_WEIGHT} has shape {list(weight.shape)} and {HEAD_BIAS} {list(bias.shape)}"
        raise ValueError(f"{path}: {shapes}; expected [classes, hidden] and [classes]")
    if not isinstance(old, nn.Linear) or old.in_features != weight.shape[-1]:
        raise ValueError(f"{type(model).__name__} has no linear layer 'score' of {weight.shape[-1]} inputs; expected a sequence classifier")
    # skip_init: a linear layer would draw start values from the program's random numbers.
    head: nn.Module = skip_init(nn.Linear, *weight.shape[::-1], device=old.weight.device, dtype=old.weight.dtype)  # type: ignore[no-untyped-call]
    head.load_state_dict({"weight": weight, "bias": bias})
    model.score = head
    model.num_labels = model.config.num_labels = len(weight)  # type: ignore[union-attr, assignment]  # transformers' config


def write_beside(
    path: Path,
    config: DecoderConfig,
    adaptation: Adaptation,
    extra: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    base_checksums: Checksums | None,
) -> None:
    """Writes blackswan.json, with the checksums of the tensors beside it and of the base, and a digest of all that it says."""
    own = {"classes": adaptation.classes, "pooling": adaptation.pooling, "nf4": adaptation.nf4}
    note = _STOCK if adaptation.pooling == "last" else _NO_STOCK.format(pooling=adaptation.pooling)
    values = {"transformers": note} | own | {"architecture": _architecture(config), "extra": dict(extra)}
    if adaptation.double_quantize:
        values["double_quantize"] = True
    if adaptation.targets:
        values["lora"] = {"rank": adaptation.rank, "alpha": float(adaptation.alpha), "targets": adaptation.targets}
    kept = {name: checksum(tensor) for name, tensor in tensors.items()}
    values["checksums"] = {"tensors": kept, "base": dict(base_checksums or {})}
    try:
        text = strict_json.dumps(values | {"digest": _digest(values)})
    except ValueError as error:
        raise ValueError(f"{path.name} could not be read again with what it is to keep ({error}); leave that out of `extra`") from None
    path.write_text(text + "\n")


def _digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of what blackswan.json says beside its own digest."""
    said = {key: value for key, value in values.items() if key != "digest"}
    return hashlib.sha256(json.dumps(json.loads(json.dumps(said)), sort_keys=True).encode()).hexdigest()


def read_beside(path: Path, config: DecoderConfig) -> dict[str, Any]:
    """The content of a blackswan.json, checked; a ValueError for a base of another architecture than `config`."""
    values = read_object(path)
    for key in _BESIDE:
        if key not in values:
            raise ValueError(f"{path}: no key {key!r}; it is damaged or was edited; restore it from a copy")
    for key in values:
        if key not in _BESIDE and key not in _OPTIONAL:
            raise ValueError(f"{path}: unknown key {key!r}; expected {', '.join((*_BESIDE, *_OPTIONAL))}")
    for key, kind in (_BESIDE | {key: kind for key, kind in _OPTIONAL.items() if key in values}).items():
        if type(values[key]) is not kind:
            raise ValueError(f"{path}: {key} is {values[key]!r}; expected {kind.__name__}")
    if [type(values["checksums"].get(part)) for part in ("tensors", "base")] != [dict, dict]:
        raise ValueError(f"{path}: checksums is {short(values['checksums'])}; expected those of tensors and of the base")
    if values["pooling"] not in POOLINGS:
        raise ValueError(f"{path}: pooling is {values['pooling']!r}; expected one of {', '.join(POOLINGS)}")
    for key, value in _architecture(config).items():
        if (stored := values["architecture"].get(key)) != value:
            raise ValueError(f"{path}: trained on a decoder with {key} {stored!r}, this one has {value!r}; use its own base")
    if values["digest"] != _digest(values):
        raise ValueError(f"{path}: is not what was saved: it is damaged or was edited; restore it from a copy")
    return values


def _architecture(config: DecoderConfig) -> dict[str, Any]:
    """What a base must have in common with that of training; a language-model head and a position limit are not used."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in ("tied", "max_positions")}


def require_named(expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], source: str) -> None:
    """Raises a ValueError that names the first tensor that is missing, unexpected or of another shape."""
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing:
        raise ValueError(f"{source}: no tensor {missing[0]!r} ({len(missing)} missing) of this architecture, these targets and head")
    if extra:
        raise ValueError(f"{source}: unexpected tensor {extra[0]!r} ({len(extra)} in all); targets and architecture do not have it")
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{source}: {name} has shape {list(tensors[name].shape)}; architecture, rank and classes say {list(shape)}")


def _peft_config(adaptation: Adaptation, base: Path | None) -> dict[str, Any]:
    """The content of adapter_config.json: the keys that every PEFT since 0.8 knows."""
    alpha = int(adaptation.alpha) if float(adaptation.alpha).is_integer() else adaptation.alpha
    return {
        "auto_mapping": None,
        "base_model_name_or_path": None if base is None else str(base),
        "alpha_pattern": {},
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": ["score"],
        "peft_type": "LORA",
        "r": adaptation.rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": list(target_modules(adaptation.targets)),
        "task_type": "SEQ_CLS",
        "use_dora": False,
        "use_rslora": False,
    }


_OWN_KEYS = _peft_config(Adaptation(classes=2, rank=1, alpha=1.0), None).keys()


def _is_own(folder: Path, values: Mapping[str, Any]) -> bool:
    """Whether an adapter has a blackswan.json, or has to: every PEFT writes keys in adapter_config.json that `save_adapter` does not."""
    return is_there(folder / BESIDE) or values.keys() == _OWN_KEYS


class _PeftConfig:
    """An adapter_config.json whose every reading names the file and the key in its errors."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    def refuse_unsupported(self) -> None:
        """Refuses whatever makes the adapter another function than LoRA's; keys of later versions pass when they are off."""
        for key, allowed in _NEUTRAL.items():
            value = self.values.get(key, allowed[0])
            if key == "peft_type" and key not in self.values:
                raise ValueError(f"{self.path}: no key {key!r}; is it PEFT's?")
            if not any(value is one or (isinstance(one, str) and value == one) for one in allowed):
                raise self._error(key, " or ".join(map(repr, allowed)))
        for key, value in self.values.items():
            known = key in _IRRELEVANT or key in _NEUTRAL or key in _READ
            if not known and value not in (None, False, {}, []):
                raise self._error(key, "that it is off: nothing but plain LoRA is implemented")
        saved = self.values.get("modules_to_save")
        if not isinstance(saved, list) or "score" not in saved or any(name not in ("score", "classifier") for name in saved):
            raise self._error("modules_to_save", "['score']: the head is saved with the adapter, and nothing else of the base")

    def rank(self) -> int:
        value = self.values.get("r")
        if type(value) is not int or value < 1:
            raise self._error("r", "a positive integer")
        return value

    def alpha(self) -> float:
        value = self.values.get("lora_alpha")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MOST_ALPHA:
            raise self._error("lora_alpha", f"a number above 0 and up to {MOST_ALPHA:g}")
        return float(value)

    def targets(self) -> str:
        """The name in `TARGETS` of the set of modules, or their names with commas between."""
        value = self.values.get("target_modules")
        if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
            raise self._error("target_modules", f"a list of names among {', '.join(TARGETS['all'])}")
        names = [name.rpartition(".")[2] for name in value]  # PEFT may list every path; a layer that it left out lacks its tensors
        for name in names:
            if name not in TARGETS["all"]:
                near = difflib.get_close_matches(name, TARGETS["all"], n=1)
                hint = f" (nearest to {name!r}: {near[0]})" if near else ""
                raise self._error("target_modules", f"names among {', '.join(TARGETS['all'])}{hint}")
        return targets_named(names)

    def base(self) -> Path | None:
        value = self.values.get("base_model_name_or_path")
        return Path(value) if isinstance(value, str) and value else None

    def _error(self, key: str, expected: str) -> ValueError:
        return ValueError(f"{self.path}: {key} is {self.values.get(key)!r}; expected {expected}")


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a safetensors file, their names without the prefix that each must have; errors name the file."""
    if not path.is_file():
        pickled = path.with_suffix(".bin").is_file()
        hint = "convert the .bin file to safetensors" if pickled else "it holds the tensors, copy it into the folder"
        raise FileNotFoundError(f"{path}: no such file; {hint}")
    try:
        with safe_open(path, framework="pt") as file:
            # Copies: the library's tensors are the mapped file, and change with it.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); copy it again") from None
    for name, tensor in tensors.items():
        _require_storable(name, tensor, path)
        if not name.startswith(prefix):
            raise ValueError(f"{path}: unexpected tensor {name!r}; every name begins with {prefix!r}")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _require_storable(name: str, tensor: Tensor, path: Path) -> None:
    if tensor.dtype not in STORED:
        raise ValueError(f"{path}: tensor {name!r} is stored as {tensor.dtype}; expected {', '.join(map(str, STORED))}")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{path}: tensor {name!r} holds NaN or infinity; the file is damaged, or training diverged before it was saved")


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; errors name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; copy it into the folder")
    try:
        value = strict_json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return value
