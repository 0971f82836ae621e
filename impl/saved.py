"""What training leaves, as a pipeline opens it: an adapter beside a checkpoint, or a merged checkpoint with its head."""

from dataclasses import dataclass
from pathlib import Path

from blackswan.impl.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, BESIDE, HEAD, Adapter, load_adapter, read_object
from blackswan.impl.apr import is_apr
from blackswan.impl.checkpoint import CONFIG, load_checkpoint
from blackswan.impl.checksums import Checked
from blackswan.impl.config import ClassifyConfig, DecoderConfig, RopeScaling
from blackswan.impl.decoder import random_tensors
from blackswan.impl.folder import is_there
from blackswan.impl.merge import load_merged
from blackswan.impl.tensors import Tensors
from blackswan.impl.tokens import ByteTokens, Tokens, load_tokenizer

RANDOM = "random_architecture"
"""The key beside an adapter or a merged model under which the architecture of random base weights is."""


@dataclass(frozen=True)
class Saved:
    """Architecture, settings, base weights and tokens of a folder; `source` is the checkpoint's folder, None for random weights.

    Of a merged checkpoint the adapter is its head, without updates.
    """

    architecture: DecoderConfig
    config: ClassifyConfig
    base: Tensors
    adapter: Adapter
    tokens: Tokens
    source: Path | None


def is_merged(folder: Path) -> bool:
    """Whether a folder holds a merged checkpoint; False for an adapter.

    Raises a FileNotFoundError where there is no such folder and a ValueError for one that is neither.
    """
    if is_apr(folder):
        raise ValueError(f"{folder}: an .apr file is a base model without a head; expected it beside the adapter that was trained on it")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected an adapter or a merged model")
    if any((folder / name).exists() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        return False
    if (folder / CONFIG).exists() and any((folder / name).exists() for name in (HEAD, BESIDE)):
        return True
    found = f"a checkpoint without a head (no {HEAD})" if (folder / CONFIG).exists() else "something else"
    raise ValueError(f"{folder}: neither an adapter ({ADAPTER_CONFIG}) nor a merged model ({CONFIG} and {HEAD}); it is {found}")


def open_adapter(folder: Path, model: Path | None) -> Saved:
    """An adapter on its base, or on the checkpoint `model`, with the settings that it was saved with.

    Raises a ValueError for an adapter that names no base where no `model` is given, and as `load_adapter`, `load_checkpoint` and
    `load_tokenizer` do.
    """
    source = model or _named_base(folder / ADAPTER_CONFIG)
    if source is None:
        return _on_random(folder)
    checkpoint = load_checkpoint(source)
    adapter = load_adapter(folder, checkpoint.config)
    config = _settings(adapter, folder)
    base = Checked(checkpoint.tensors, adapter.base_checksums, source, folder)
    return Saved(checkpoint.config, config, base, adapter, _tokens(source, config), source)


def open_merged(folder: Path) -> Saved:
    """A merged checkpoint with the settings of its training, its weights not quantised.

    Raises as `load_merged` and `load_tokenizer` do.
    """
    checkpoint, head = load_merged(folder)
    config = _settings(head, folder)
    tokens = _bytes(config) if RANDOM in head.extra else _tokens(folder, config)
    return Saved(checkpoint.config, config, checkpoint.tensors, head, tokens, folder)


def _named_base(path: Path) -> Path | None:
    name = read_object(path).get("base_model_name_or_path")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"{path}: base_model_name_or_path is {name!r}; expected a folder's name or null")
    return Path(name) if name else None  # PEFT writes an empty one where it knows none


def _on_random(folder: Path) -> Saved:
    """An adapter that was trained on random weights, which its settings give again."""
    path = folder / BESIDE
    extra = read_object(path).get("extra") if is_there(path) else None
    architecture = extra.get(RANDOM) if isinstance(extra, dict) else None
    if architecture is None:
        raise ValueError(f"{folder / ADAPTER_CONFIG}: no base_model_name_or_path; say on which checkpoint the adapter was trained")
    try:
        scaling = architecture.get("rope_scaling")
        decoder = DecoderConfig(**{**architecture, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {RANDOM} is no architecture ({error})") from None
    adapter = load_adapter(folder, decoder)
    config = _settings(adapter, folder)
    base = Checked(random_tensors(decoder, config.seed), adapter.base_checksums, f"random weights of seed {config.seed}", folder)
    return Saved(decoder, config, base, adapter, _bytes(config), None)


def _tokens(source: Path, config: ClassifyConfig) -> Tokens:
    return load_tokenizer(source, config.max_seq_len, config.padding_side)


def _bytes(config: ClassifyConfig) -> Tokens:
    return ByteTokens(config.max_seq_len, config.padding_side)


def _settings(adapter: Adapter, folder: Path) -> ClassifyConfig:
    """The settings beside an adapter; without them, as PEFT's own adapters are, the defaults and what the adapter itself says."""
    adaptation = adapter.adaptation
    own = {"num_classes": adaptation.classes, "pooling": adaptation.pooling, "quantize_nf4": adaptation.nf4}
    own["double_quantize"] = adaptation.double_quantize
    if adaptation.targets:  # a merged model's head has none, and only the settings say what was merged
        own |= {"lora_rank": adaptation.rank, "lora_alpha": adaptation.alpha, "lora_targets": adaptation.targets}
    stored = adapter.extra.get("settings", {})
    try:
        if not isinstance(stored, dict):
            raise ValueError(f"settings is {stored!r}; expected an object")
        return ClassifyConfig.from_mapping({**stored, **own})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / BESIDE}: {error}") from None
