"""Checkpoints of which a part is damaged: a key of the configuration or of the tokenizer's, or the index of the shards."""

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import load, load_file, save

from blackswan.falsifiers.numeric.comparison import Comparison
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import STORAGE
from blackswan.falsifiers.system.adapter_files import CONFIG, TOKENIZER, WEIGHTS, Model
from blackswan.falsifiers.system.adapters import DTYPES
from blackswan.falsifiers.system.command_problem import tokenizer
from blackswan.falsifiers.system.damage import changed_meanwhile
from blackswan.falsifiers.system.derived_damage import (
    ABSENT,
    SETTINGS,
    TEXTS,
    TOKENIZER_CONFIG,
    Damage,
    Values,
    edited,
    forms,
    judged,
    small_base,
)
from blackswan.falsifiers.system.same import same, same_tensors
from blackswan.falsifiers.system.trial import Trial

INDEX, SHARDS = "model.safetensors.index.json", ("model-1.safetensors", "model-2.safetensors")
COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
"""Of an added token, all false: how texts are split at it."""
NOT_COUNTS = (0, -1, 1.5, 16.0, "16", True, [16], {"a": 1}, 2**40 + 1, 10**400)
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8,
}
ROTARY: dict[str, tuple[Values, str]] = {
    "two bases": ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta"),
    "two scalings": ({"rope_parameters": LLAMA3, "rope_scaling": {**LLAMA3, "factor": 4.0}}, "rope_scaling"),
    **{
        f"a scaling without its {key}": (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != key}},
            "rope_scaling",
        )
        for key in LLAMA3
    },
    "a list": ({"rope_parameters": ["default"]}, "rope_parameters"),
    "another type": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
    **{
        f"a list or an object for {key}": ({"rope_parameters": {key: value}}, "rope_parameters")
        for key, value in (("rope_type", []), ("type", {}))
    },
    "two names that differ": ({"rope_parameters": {"rope_type": "yarn", "type": "default"}}, "rope_parameters"),
    "its older name": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    "an unknown number": ({"rope_parameters": {**LLAMA3, "beta_fast": 32.0}}, "rope_parameters"),
    "a part of each head": ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "an original length apart": ({"rope_parameters": LLAMA3, "original_max_position_embeddings": 9}, "original_max_position_embeddings"),
    **{f"no {key}": ({"rope_parameters": {k: v for k, v in LLAMA3.items() if k != key}}, key) for key in (*LLAMA3,)[2:]},
    **{f"{key} as text": ({"rope_parameters": {**LLAMA3, key: "8"}}, key) for key in (*LLAMA3,)[2:]},
    **{
        f"{key} of 0": ({"rope_parameters": {**LLAMA3, key: 0}}, key.replace("max_position_embeddings", "positions"))
        for key in (*LLAMA3,)[2:]
    },
    "a factor below 1": ({"rope_parameters": {**LLAMA3, "factor": math.nextafter(1.0, 0.0)}}, "factor"),
    "no band": ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
}
"""Rotary parameters that contradict each other, or that are not computed."""
NOT_COMPUTED: Mapping[str, Any] = {
    **{"hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "attention_dropout": 0.1, "is_causal": False},
    **{"is_encoder_decoder": True, "use_bidirectional_attention": True, "partial_rotary_factor": 0.5},
    **{"quantization_config": {"bits": 4}, "auto_map": {}, "attention_chunk_size": 4, "head_dim": 7, "num_key_value_heads": 3},
    **{"per_layer_config": {}, "kv_sharing_modes": ["own"], "text_config": {}, "decoder": {}, "generator": {}},
    **{"tie_word_embeddings": "yes", "model_type": "lama", "rms_norm_eps": "1e-6"},
}
"""Values of keys with which the model would be another."""
NULLED = (
    *("attention_bias", "mlp_bias", "attention_dropout", "is_causal", "is_encoder_decoder", "use_sliding_window", "partial_rotary_factor"),
    *("use_bidirectional_attention", "quantization_config", "auto_map", "attention_chunk_size", "per_layer_config", "kv_sharing_modes"),
    *("text_config", "decoder", "generator", "layer_types", "rope_scaling", "rope_parameters"),
)
"""Keys that say nothing where they are null."""
NEUTRAL: Mapping[str, Any] = {
    **{"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0, "is_causal": True, "use_cache": False},
    **{"is_encoder_decoder": False, "use_bidirectional_attention": False, "partial_rotary_factor": 1},
    **{"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1}},
}
"""Values with which the model is what it is without the keys."""


def _config_damage(folder: Path, family: str) -> Iterator[Damage]:
    """Every key of a config.json that is read."""
    make = partial(edited, folder, CONFIG)
    for key in COUNTS:
        yield from (make({key: value}) for value in (*NOT_COUNTS, None, ABSENT))
    for key in ("num_key_value_heads", "head_dim"):
        yield from (make({key: value}) for value in NOT_COUNTS)
    for value in (0, -1e-6, 1.0, 1, "1e-6", True, None, [1e-6], 10**400, ABSENT):
        yield make({"rms_norm_eps": value}, f"{CONFIG}.*eps")
    for value in (0, -1.0, "1e4", True, [1e4], 10**400):
        yield make({"rope_theta": value}, f"{CONFIG}.*theta")
    yield from (make({key: value}, f"{CONFIG}.*{key.replace('num_key_value_', '')}") for key, value in NOT_COMPUTED.items())
    yield from (make({key: value}) for key in ("tie_word_embeddings", "model_type") for value in (0, 1, None, [True]))
    yield from (
        make({"layer_types": value}) for value in (3, [], ["full_attention"], ["full_attention", "sliding_attention"], [["full_attention"]])
    )
    yield make({"model_type": ABSENT})
    yield make({"model_type": "lama"}, "nearest: llama")
    yield make({"hidden_size": ABSENT, "hiden_size": 16}, "hidden_size.*nearest.*hiden_size")
    yield from (make(changes, f"{CONFIG}.*{named}") for changes, named in ROTARY.values())
    if family == "llama":
        yield make({"sliding_window": 4})
    else:
        # max_window_layers is how many layers have no window: with 0 all have one. Without it there are none in a model of two layers.
        yield from (make({"use_sliding_window": True, "max_window_layers": plain}, "use_sliding_window") for plain in (0, 1))
        # transformers' classes have a number of their own.
        yield from (make(changes) for changes in ({"num_key_value_heads": ABSENT}, {"head_dim": None}))
    if family != "qwen3":  # whose heads have a size of their own
        yield make({"head_dim": ABSENT, "num_attention_heads": 3, "num_key_value_heads": 3}, f"{CONFIG}.*hidden_size.*multiple")
    yield from (make(changes, taken=True) for changes in _taken(folder, family))
    longest = SETTINGS["max_seq_len"]
    for original, positions in ((longest // 2, longest), (2 * longest, longest - 1)):
        for rotary in _rotary_spellings(original):
            changes = {"rope_theta": ABSENT, "max_position_embeddings": positions, **rotary}
            yield make(changes, taken=True) if positions == longest else make(changes, "max_seq_len")


def _rotary_spellings(original: int) -> Iterator[Values]:
    """Rotary parameters, scaled and not, of a model that was first trained on so many positions, by the keys of transformers 4 and 5."""
    scaling = {key: value for key, value in LLAMA3.items() if key not in ("rope_type", "rope_theta")}
    scaling["original_max_position_embeddings"] = original
    for name in ("rope_type", "type"):
        yield {"rope_theta": 1e4, "rope_scaling": {name: "llama3", **scaling}}
    yield {"rope_parameters": {**LLAMA3, **scaling}}
    yield {"rope_parameters": {**LLAMA3, **scaling}, "original_max_position_embeddings": original}
    yield {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    yield {"rope_theta": 1e4}


def _taken(folder: Path, family: str) -> Iterator[Values]:
    """Values at their bounds, and keys that say what is so anyway."""
    nearly_one, heads = math.nextafter(1.0, 0.0), json.loads((folder / CONFIG).read_text())["num_attention_heads"]
    yield from ({"max_position_embeddings": size} for size in (SETTINGS["max_seq_len"], 2**40))
    yield from ({"rms_norm_eps": eps} for eps in (1e-30, nearly_one))
    yield from ({"rope_theta": theta} for theta in (ABSENT, 1, 1e300))
    yield {"rope_parameters": LLAMA3, "rope_scaling": LLAMA3, "original_max_position_embeddings": 8}
    yield {"rope_parameters": {"rope_type": "default", "type": "yarn"}}
    yield {"rope_parameters": {**LLAMA3, "factor": 1, "high_freq_factor": math.nextafter(1.0, 2.0)}}
    yield from (dict.fromkeys(NULLED), dict(NEUTRAL))
    yield {
        "layer_types": ["full_attention"] * 2,
        "use_sliding_window": False,
        "attention_bias": None,
        "quantization_config": None,
        "new": 1,
    }
    yield {"sliding_window": None if family == "llama" else 4, "num_attention_heads": heads}


def _shard(folder: Path) -> dict[str, str]:
    """Spreads the tensors of a checkpoint over two files, and gives the map of the index."""
    whole = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {name: SHARDS[place % 2] for place, name in enumerate(sorted(whole))}
    for file in SHARDS:
        (folder / file).write_bytes(save({name: whole[name] for name in whole if places[name] == file}))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return places


def _shards_of_several_dtypes(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """Shards whose tensors are in several dtypes, beside another file of weights that the index does not name, hold every tensor."""
    rng = trial.rng("dtypes of shards")
    decoder = {name: value.astype(STORAGE[str(rng.choice(DTYPES))]) for name, value in model.decoder.items()}
    other = {name: -value for name, value in decoder.items()}
    _shard(replace(model, decoder=decoder).write_checkpoint(folder))
    (folder / "consolidated.safetensors").write_bytes(save(other))
    return same_tensors(decoder, trial.files.read_checkpoint(folder))


def as_in_a_cache(folder: Path) -> None:
    """Makes each file a link to one of another name in another folder, as Hugging Face's cache keeps them."""
    blobs = folder.with_name("blobs")
    blobs.mkdir()
    for place, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(place))
        path.symlink_to(Path("..") / "blobs" / str(place))


def _shard_damage(folder: Path, places: Mapping[str, str], rng: Generator) -> Iterator[Damage]:
    """An index and shards that do not say the same."""
    name = str(rng.choice(sorted(places)))
    other = next(file for file in SHARDS if file != places[name])
    make, first = partial(edited, folder, INDEX), load((folder / places[name]).read_bytes())
    both = {**load((folder / other).read_bytes()), name: first[name]}
    key, narrow = "weight_map", {**first, name: first[name][1:]}
    yield Damage("a tensor of another shape", {places[name]: save(narrow)}, rf"{places[name]}: {name}.*shape")
    for file in SHARDS:
        there = "|".join(re.escape(each) for each in places if places[each] == file)
        yield Damage(f"{file} removed", {file: None}, f"{file}: no such file.*{INDEX} puts '({there})'")
    yield Damage("a tensor twice in a header", {places[name]: _twice(save(first), name)}, f"{places[name]}.*{name}.*twice")
    yield Damage("no index", {INDEX: None}, f"neither {WEIGHTS} nor {INDEX}")
    yield Damage("a whole file beside the index", {WEIGHTS: (folder / other).read_bytes()}, f"both {WEIGHTS} and {INDEX}")
    yield Damage("a tensor in both shards", {other: save(both)}, f"{other}|{places[name]}.*{name}")
    yield Damage("a tensor in no shard", {places[name]: save({k: v for k, v in first.items() if k != name})}, f"{places[name]}.*{name}")
    gone = next(each for each in first if each != name)
    index = json.dumps({key: {each: file for each, file in places.items() if each != gone}}).encode()
    both_wrong = {places[name]: save({each: value for each, value in narrow.items() if each != gone}), INDEX: index}
    yield Damage("a tensor missing beside one of another shape", both_wrong, f"{re.escape(folder.name)}: no tensor '{gone}'")
    yield make({f"{key}/{name}": other}, f"{places[name]}.*{name}")
    yield make({f"{key}/{name}": ABSENT}, f"{places[name]}.*{name}")
    yield make({f"{key}/ghost": other}, f"{other}.*ghost")
    yield from (make({f"{key}/{name}": f"{parent}/{other}"}, f"{INDEX}.*{key}") for parent in ("..", str(folder), "."))
    yield from (make({f"{key}/{name}": value}, f"{INDEX}.*{key}") for value in (3, None, [other]))
    yield from (make({key: value}) for value in (ABSENT, [*places], 3))
    yield make({"metadata": ABSENT, "surplus": 1}, taken=True)
    yield make({"metadata": {"total_size": int(rng.integers(2**40))}}, taken=True)  # as writers count that know a tied head


def _twice(stored: bytes, name: str) -> bytes:
    """A safetensors file whose header has one tensor's entry twice, the first time in another dtype of as many bytes."""
    length = int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8 : 8 + length])
    entry = header[name] | {"dtype": {"F64": "I64", "F32": "I32"}.get(header[name]["dtype"], "I16")}
    twice = f'{{"{name}":{json.dumps(entry)},{json.dumps(header)[1:]}'.encode()
    return len(twice).to_bytes(8, "little") + twice + stored[8 + length :]


def _tokenizer_damage(folder: Path, family: str) -> Iterator[Damage]:
    """A tokenizer_config.json by which texts would be split otherwise; and a tokenizer that draws lots, has more tokens than the model or
    adds more to a text than it may have. As many are taken."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.processors import TemplateProcessing

    make, new, end = partial(edited, folder, TOKENIZER_CONFIG), "<new>", {"content": "<eos>", "special": True}
    yield from (make({key: new}) for key in ("pad_token", "bos_token", "eos_token", "unk_token", "sep_token", "cls_token", "mask_token"))
    yield make({"split_special_tokens": True})
    for name in ("Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", ABSENT):
        followed = family == "qwen2" or name in ("Qwen2Tokenizer", "Qwen2TokenizerFast", *([ABSENT] if family == "qwen3" else []))
        yield make({"add_prefix_space": True, "tokenizer_class": name}, taken=not followed)
    yield make({"add_prefix_space": False, "tokenizer_class": "Qwen2Tokenizer"}, taken=True)
    stored = json.loads((folder / TOKENIZER).read_text())
    word = next(word for word in stored["model"]["vocab"] if word not in [token["content"] for token in stored["added_tokens"]])
    for named in (new, {"content": new}, word, {"content": word}):
        yield from (make({key: [named]}) for key in ("additional_special_tokens", "extra_special_tokens"))
        yield make({"extra_special_tokens": {"image": named}})
        yield from (make({key: named}) for key in ("pad_token", "eos_token"))
    yield from (make({"extra_special_tokens": value}) for value in (True, 1, 1.5, "<eos>"))
    yield make({"pad_token": {"content": new}})
    yield make({"pad_token": {**end, "__type": "AddedToken", **dict.fromkeys(FLAGS, True)}}, taken=True)  # tokenizer.json's flags count
    yield from (make({"added_tokens_decoder": {"1": token}}) for token in ({"content": new}, *({**end, flag: True} for flag in FLAGS)))
    yield make({"pad_token": "<eos>", "split_special_tokens": False, "added_tokens_decoder": {"1": end}, "surplus": 1}, taken=True)
    yield from (_split_at_plainly(folder, {**end, **said}, flag) for flag in FLAGS for said in ({flag: False}, {}))
    for named in ({"eos_token": "<eos>"}, {"additional_special_tokens": ["<eos>"]}, {"extra_special_tokens": ["<eos>"]}):  # as most are
        yield make({"added_tokens_decoder": {"1": {**end, "lstrip": True}}, **named}, f"{TOKENIZER_CONFIG}.*another lstrip")
        yield make({"added_tokens_decoder": {"1": end}, **named}, taken=True)
    plain = {**end, "special": False}  # left out, `normalized` is true for it
    yield make({"added_tokens_decoder": {"1": plain}}, f"{TOKENIZER_CONFIG}.*another normalized")
    yield make({"added_tokens_decoder": {"1": {**plain, "normalized": False}}}, taken=True)
    yield edited(folder, TOKENIZER, {"model/dropout": 0.1}, f"{TOKENIZER}.*dropout")
    longest = SETTINGS["max_seq_len"]
    for count in (longest, longest + 1):
        closing = Tokenizer.from_str((folder / TOKENIZER).read_text())
        closing.post_processor = TemplateProcessing(single=f"$A{' <eos>' * count}", special_tokens=[("<eos>", 1)])
        changed: dict[str, bytes | None] = {TOKENIZER: closing.to_str().encode()}
        yield Damage(f"{count} end tokens a text", changed, f"max_seq_len.*{count}", taken=count == longest)
    far = Tokenizer(WordLevel({"few": 0, "far": 10**6}, "few")).to_str().encode()
    yield Damage("few tokens, one of them beyond the model's", {TOKENIZER: far, TOKENIZER_CONFIG: None}, f"{TOKENIZER}.*embeddings")
    yield one_token_more(folder)


def one_token_more(folder: Path) -> Damage:
    """The tokenizer has a token more than the model has embeddings."""
    values = json.loads((folder / TOKENIZER).read_text())
    more = {"id": tokenizer().get_vocab_size(), "content": "<more>", "special": True}
    values["added_tokens"].append(more | dict.fromkeys(FLAGS, False))
    return Damage("a token more than the model has", {TOKENIZER: json.dumps(values).encode()}, f"{TOKENIZER}.*embeddings")


def _split_at_plainly(folder: Path, end: Mapping[str, Any], flag: str) -> Damage:
    """A flag of the end token is true in tokenizer.json, and beside it false, or left out, which transformers takes for false."""
    values = json.loads((folder / TOKENIZER).read_text())
    next(token for token in values["added_tokens"] if token["content"] == end["content"])[flag] = True
    beside = {"added_tokens_decoder": {"1": end}}
    files: dict[str, bytes | None] = {TOKENIZER: json.dumps(values).encode(), TOKENIZER_CONFIG: json.dumps(beside).encode()}
    said = "false" if flag in end else "left out"
    return Damage(f"{flag} is true in {TOKENIZER} and {said} in {TOKENIZER_CONFIG}", files, f"{TOKENIZER_CONFIG}.*another {flag}")


def refuses_parts(trial: Trial) -> Iterator[Comparison]:
    """Each key of config.json and tokenizer_config.json, and an index with its shards, which is read as the one file that they were, also
    where all of them are links or in several dtypes, and not once a shard, or what a link to it leads to, has changed."""
    rng = trial.rng("parts")
    with tempfile.TemporaryDirectory() as parent:
        folder, model = small_base(trial, Path(parent))
        family = model.scalars["family"]

        def ask(**changes: Any) -> object:
            return trial.classifiers.fresh(folder, {**SETTINGS, **changes}, TEXTS)

        whole = ask()
        damages = [*_config_damage(folder, family), *_tokenizer_damage(folder, family)]
        damages += [each for file in (CONFIG, TOKENIZER_CONFIG) for each in forms(folder, file, rng)]
        yield from judged(trial, folder, damages, ask)
        yield trial.refuses("longer texts than positions", partial(ask, max_seq_len=513), "max_seq_len", "ValueError")
        places = _shard(folder)
        yield from same("answer of the shards", whole, ask())
        yield from (each for file in SHARDS for each in changed_meanwhile(trial, folder, folder / file))
        yield from _shards_of_several_dtypes(trial, model, Path(parent) / "of several dtypes")
        as_in_a_cache(folder)
        yield from same("answer of links to the shards", whole, ask())
        yield from changed_meanwhile(trial, folder, folder / SHARDS[0])  # at first it is a link still, and what it leads to is written
        yield from judged(trial, folder, [*_shard_damage(folder, places, rng), *forms(folder, INDEX, rng)], ask)
