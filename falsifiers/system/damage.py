"""Damaged folders of checkpoints and adapters, and names of no device: each is refused with a word of its cause."""

import errno
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors.numpy import load_file, save_file

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.checks.refusals import truncate
from blackswan.falsifiers.numeric.comparison import Comparison, broken, value_at_most
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.system.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BESIDE,
    CONFIG,
    PREFIX,
    TOKENIZER,
    WEIGHTS,
    Model,
    generated,
    one_ulp_off,
)
from blackswan.falsifiers.system.config_files import SCALED, SCALING
from blackswan.falsifiers.system.footprint import most_held
from blackswan.falsifiers.system.same import content, same
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array

ABSENT = object()
"""Stands for the value of a key that is left out."""
Damage = Callable[[Path, Generator], str]
"""Damages a folder and returns what the refusal must name, as a regular expression."""


def _removed(file: str) -> Damage:
    def damage(folder: Path, rng: Generator) -> str:
        del rng
        (folder / file).unlink()
        return file

    return damage


def _pickled(file: str) -> Damage:
    """The weights are in a file that pickles."""

    def damage(folder: Path, rng: Generator) -> str:
        del rng
        (folder / file).rename((folder / file).with_suffix(".bin"))
        return "convert the .bin"

    return damage


def _truncated(file: str) -> Damage:
    def damage(folder: Path, rng: Generator) -> str:
        truncate(folder / file, rng)
        return file

    return damage


def _header_length(folder: Path, rng: Generator) -> str:
    stored = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", int(rng.integers(2**40, 2**60))) + stored[8:])
    return WEIGHTS


def _config(file: str, named: str | None = None, **changes: Any) -> Damage:
    """Other values of keys, by functions of the whole where they depend on it; the refusal names the first unless it is to name another."""

    def damage(folder: Path, rng: Generator) -> str:
        del rng
        config = json.loads((folder / file).read_text())
        changed = {key: value(config) if callable(value) else value for key, value in changes.items()}
        kept = {key: value for key, value in {**config, **changed}.items() if value is not ABSENT}
        (folder / file).write_text(json.dumps(kept))
        return named or f"{file}.*{next(iter(changes))}"

    return damage


def _tensors(file: str, place: str, change: Callable[[dict[str, Array], str], str], of: str = "") -> Damage:
    """A change of one tensor whose name holds `of`; it returns what the refusal must name after that place."""

    def damage(folder: Path, rng: Generator) -> str:
        tensors = load_file(folder / file)
        names = sorted(name for name in tensors if of in name)
        named = change(tensors, names[int(rng.integers(len(names)))])
        save_file(tensors, folder / file)
        return f"{place}.*{named}"

    return damage


def _missing(tensors: dict[str, Array], name: str) -> str:
    del tensors[name]
    return name.removeprefix(PREFIX)


def _surplus(tensors: dict[str, Array], name: str) -> str:
    tensors[f"{name.rpartition('.')[0]}.surplus"] = tensors[name]
    return "surplus"


def _two_missing(tensors: dict[str, Array], name: str) -> str:
    """Two of a kind are missing, and three are there that should not be: the refusal says how many, of these or of those."""
    alike = (each for each in sorted(tensors, reverse=True) if each != name and ("lora_" in each) == ("lora_" in name))
    gone = (name, next(alike))
    for extra in ("surplus", "surplus_a", "surplus_b"):
        tensors[f"{name.rpartition('.')[0]}.{extra}"] = tensors[name].copy()
    for each in gone:
        del tensors[each]
    return rf"(({'|'.join(each.removeprefix(PREFIX) for each in gone)}).*\b2\b|surplus.*\b3\b)"


def _unprefixed(tensors: dict[str, Array], name: str) -> str:
    tensors[name.removeprefix(PREFIX)] = tensors.pop(name)
    return name.removeprefix(PREFIX)


def _misshapen(tensors: dict[str, Array], name: str) -> str:
    tensors[name] = np.ascontiguousarray(tensors[name][..., :-1])
    return name.removeprefix(PREFIX)


def _turned(tensors: dict[str, Array], name: str) -> str:
    """As many numbers, in columns for rows."""
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    return name.removeprefix(PREFIX)


def _single(tensors: dict[str, Array], name: str) -> str:
    """A number, without a dimension."""
    tensors[name] = tensors[name].reshape(-1)[:1].reshape(())
    return name.removeprefix(PREFIX)


def _integers(tensors: dict[str, Array], name: str) -> str:
    tensors[name] = tensors[name].astype(np.int32)
    return name


def _one_ulp(tensors: dict[str, Array], name: str) -> str:
    """An element is the next number that its dtype has."""
    one_ulp_off(tensors[name])
    return name.removeprefix(PREFIX)


def _nearly_tied(tensors: dict[str, Array], name: str) -> str:
    """An output layer beside the embedding that it is said to be, different in one element by one ulp."""
    tensors["lm_head.weight"] = tensors[name].copy()
    return _one_ulp(tensors, "lm_head.weight") and "tie_word_embeddings"


def _nearly_tied_in_float64(tensors: dict[str, Array], name: str) -> str:
    """So different in float64 from an embedding in float32, which does not tell them apart."""
    tensors["lm_head.weight"] = tensors[name].astype(np.float64)
    return _one_ulp(tensors, "lm_head.weight") and "tie_word_embeddings"


def _both_in_float64(tensors: dict[str, Array], name: str) -> str:
    """The same beside an embedding in float64."""
    tensors[name] = tensors[name].astype(np.float64)
    return _nearly_tied(tensors, name)


def _tied_in_half(tensors: dict[str, Array], name: str) -> str:
    """An output layer beside the embedding that it is said to be, which is rounded to 16 bits."""
    tensors["lm_head.weight"] = tensors[name].astype(np.float16)
    return "tie_word_embeddings"


def _tied_but_for_the_last(folder: Path, rng: Generator) -> str:
    """An output layer beside the embedding that it is said to be, of more than 2²¹ numbers, different in the last one alone."""

    def longer(tensors: dict[str, Array], name: str) -> str:
        rows, more = 1 + 2**21 // tensors[name].size, int(rng.integers(2, 50))
        tensors[name] = np.concatenate([*[tensors[name]] * rows, tensors[name][:more]])
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**config, "vocab_size": len(tensors[name])}))
        tensors["lm_head.weight"] = tensors[name].copy()
        tensors["lm_head.weight"][-1, -1] += 1
        return "tie_word_embeddings"

    return _weights(longer, "embed_tokens")(folder, rng)


def _not_finite(value: float, place: int) -> Callable[[dict[str, Array], str], str]:
    def change(tensors: dict[str, Array], name: str) -> str:
        tensors[name].reshape(-1)[place] = value
        return name.rpartition(".")[0]  # a quantised weight is kept under other names there

    return change


_checkpoint, _adapter = partial(_config, CONFIG), partial(_config, ADAPTER_CONFIG)
_weights, _factors = partial(_tensors, WEIGHTS, CHECKPOINT.name), partial(_tensors, ADAPTER_WEIGHTS, ADAPTER_WEIGHTS)
CHECKPOINT_DAMAGE: dict[str, Damage] = {
    "truncated safetensors": lambda folder, rng: _truncated(WEIGHTS)(folder, rng) + "(?!.*changed)",
    "corrupt safetensors header": _header_length,
    "missing tensor": _weights(_missing),
    "two missing tensors, and three others": _weights(_two_missing),
    "surplus tensor": _weights(_surplus),
    "misshapen tensor": _weights(_misshapen),
    "integer tensor": _weights(_integers),
    "tied output layer one ulp off": _weights(_nearly_tied, "embed_tokens"),
    "tied output layer in float64 one ulp off": _weights(_nearly_tied_in_float64, "embed_tokens"),
    "tied output layer one ulp off, both in float64": _weights(_both_in_float64, "embed_tokens"),
    "tied output layer of another last number": _tied_but_for_the_last,
    "tied output layer rounded to 16 bits": _weights(_tied_in_half, "embed_tokens"),
    "encoder": _checkpoint("decoder|encoder", model_type="bert", architectures=["BertForSequenceClassification"]),
    "unknown model type": _checkpoint(model_type="mystery"),
    "fewer layers than stored": _checkpoint(r"model\.layers", num_hidden_layers=1, layer_types=["full_attention"]),
    "no config": _removed(CONFIG),
    "no weights": _removed(WEIGHTS),
    "weights in a .bin file": _pickled(WEIGHTS),
}
NOT_FINITE: dict[str, Damage] = {
    "NaN in a projection": _weights(_not_finite(np.nan, -1), "_proj.weight"),
    "infinity in a projection": _weights(_not_finite(np.inf, 0), "_proj.weight"),
    "NaN in a norm": _weights(_not_finite(np.nan, 0), "norm.weight"),
    "infinity in the embedding": _weights(_not_finite(-np.inf, -1), "embed_tokens"),
}
"""Weights of which a run refuses to begin, quantised or not."""
TOKENIZER_DAMAGE: dict[str, Damage] = {"no tokenizer": _removed(TOKENIZER), "truncated tokenizer": _truncated(TOKENIZER)}
ON: Mapping[str, Any] = {
    **{
        "layer_replication": [[0, 1], [0, 2]],
        "trainable_token_indices": [1],
        "target_parameters": ["mlp.gate"],
        "exclude_modules": ["k_proj"],
    },
    **{"alora_invocation_tokens": [1, 2], "arrow_config": {"top_k": 2}, "layers_pattern": "layers", "megatron_config": {"hidden_size": 16}},
    **{
        "use_qalora": True,
        "use_bdlora": {"nblocks": 2},
        "velora_config": {"groups": 2},
        "monteclora_config": {"n": 2},
        "kasa_config": {"a": 1},
    },
}
"""Keys of PEFT's by which an adapter would be another function, or may be one, with values that it has where they are on."""
ADAPTER_DAMAGE: dict[str, Damage] = {
    "no config": _removed(ADAPTER_CONFIG),
    "no weights": _removed(ADAPTER_WEIGHTS),
    "weights in a .bin file": _pickled(ADAPTER_WEIGHTS),
    "truncated config": _truncated(ADAPTER_CONFIG),
    "truncated weights": _truncated(ADAPTER_WEIGHTS),
    "missing factor": _factors(_missing, "lora_"),
    "two missing factors, and three others": _factors(_two_missing, "lora_"),
    "missing head": _factors(_missing, "score.weight"),
    "surplus tensor": _factors(_surplus, "lora_"),
    "tensor without the prefix": _factors(_unprefixed, "lora_"),
    "misshapen factor": _factors(_misshapen, "lora_"),
    "misshapen head": _factors(_misshapen, "score.weight"),
    "factor whose rows are columns": _factors(_turned, "lora_"),
    "head whose rows are columns": _factors(_turned, "score.weight"),
    "factor without dimensions": _factors(_single, "lora_"),
    "head without dimensions": _factors(_single, "score.weight"),
    "bias without dimensions": _factors(_single, "score.bias"),
    "integer factor": _factors(_integers, "lora_"),
    "NaN in a factor": _factors(_not_finite(np.nan, -1), "lora_"),
    "infinite head": _factors(_not_finite(np.inf, 0), "score."),
    "rank that the tensors do not have": _adapter(f"{ADAPTER_WEIGHTS}.*lora_", r=lambda config: config["r"] + 1),
    "fewer targets than tensors": _adapter(f"{ADAPTER_WEIGHTS}.*unexpected", target_modules=["q_proj"]),
    "rank as text": _adapter(r="8"),
    "rank zero": _adapter(r=0),
    "no alpha": _adapter(lora_alpha=None),
    "alpha zero": _adapter(lora_alpha=0),
    "alpha beyond float64": _adapter(lora_alpha=10**400),
    "unknown target": _adapter("target_modules.*nearest.*v_prj.*v_proj", target_modules=["q_proj", "v_prj"]),
    "targets as a pattern": _adapter(target_modules=".*_proj"),
    "no head": _adapter(modules_to_save=None),
    "more than the head": _adapter(modules_to_save=["score", "embed_tokens"]),
    "an object beside the head": _adapter(modules_to_save=["score", {}]),
    "another method": _adapter(peft_type="IA3"),
    "another task": _adapter(task_type="CAUSAL_LM"),
    "rsLoRA": _adapter(use_rslora=True),
    "DoRA": _adapter(use_dora=True),
    "ranks by module": _adapter(rank_pattern={"q_proj": 2}),
    "alphas by module": _adapter(alpha_pattern={"q_proj": 2}),
    "alphas of a layer": _adapter(alpha_pattern={f"model.layers.0.self_attn.{name}": 2 for name in ("q_proj", "v_proj")}),
    "trained biases": _adapter(bias="all"),
    "biases of B": _adapter(lora_bias=True),
    "chosen layers": _adapter(layers_to_transform=[0]),
    "transposed weights": _adapter(fan_in_fan_out=True),
    **{
        f"base changed by {start}": _adapter(init_lora_weights=start)
        for start in ("pissa", "pissa_niter_4", "olora", "corda", "eva", "loftq")
    },
    "a key of a later version, on": _adapter(use_something_new=True),
    **{f"{key} of PEFT, on": _adapter(**{key: value}) for key, value in ON.items()},
}
OTHER_BASES: dict[str, tuple[str, str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "number of layers": ("theirs", f"{ADAPTER_WEIGHTS}.*lora_", lambda base: {"num_hidden_layers": 2 * base["num_hidden_layers"]}),
    "width": ("theirs", f"{ADAPTER_WEIGHTS}.*(lora_|score)", lambda base: {"hidden_size": 2 * base["hidden_size"]}),
    "epsilon": ("ours", f"{BESIDE}.*eps", lambda base: {"rms_norm_eps": float(np.nextafter(base["rms_norm_eps"], np.inf))}),
    "theta": ("ours", f"{BESIDE}.*theta", lambda base: {"rope_theta": float(np.nextafter(base["rope_theta"], np.inf))}),
    "intermediate size": ("ours", f"{BESIDE}.*intermediate", lambda base: {"intermediate_size": 2 * base["intermediate_size"]}),
    "vocabulary": ("ours", f"{BESIDE}.*vocab", lambda base: {"vocab_size": base["vocab_size"] + 1}),
    "family": ("ours", f"{BESIDE}.*family", lambda base: {"model_type": "llama" if base["model_type"] != "llama" else "qwen2"}),
    "division into heads": (
        "ours",
        f"{BESIDE}.*head",
        lambda base: {key: 2 * base[key] for key in ("num_attention_heads", "num_key_value_heads")} | {"head_dim": base["head_dim"] // 2},
    ),
    "scaling of the rotary frequencies": (
        "ours",
        f"{BESIDE}.*rope_scaling",
        lambda _: _scaled(),
    ),
}
"""What of a base's architecture is another, also where no shape shows it; an adapter that does, and what the refusal names."""


def _alpha_one_ulp(folder: Path, rng: Generator) -> str:
    """Either file is named with its own number, before or behind it."""
    own = json.loads((folder / BESIDE).read_text())["lora"]["alpha"]
    other = float(np.nextafter(own, np.inf))
    _adapter("", lora_alpha=lambda _: other)(folder, rng)
    pairs = ((re.escape(repr(number)), re.escape(file)) for number, file in ((other, ADAPTER_CONFIG), (own, BESIDE)))
    return ".*".join(rf"({number}\b.*{file}|{file}.*{number}\b)" for number, file in pairs)


EDITS: dict[str, Damage] = {
    "factor one ulp off": _factors(_one_ulp, "lora_"),
    "head one ulp off": _factors(_one_ulp, "score."),
    "alpha one ulp off": _alpha_one_ulp,
}
"""The least that can be another in an adapter that was saved with checksums."""


MOMENT = 1_234_567_890_123_456_789
"""Nanoseconds: the last change of a file, in the midst of a second, a millisecond and a microsecond."""


def refuses_checkpoint(trial: Trial) -> list[Comparison]:
    """Each damage of the shipped checkpoint is refused by the name of the file or the key, and a weight that is not finite by its own."""
    rng = trial.rng("not finite")
    name, nf4, double = str(rng.choice([*NOT_FINITE])), bool(rng.integers(3)), bool(rng.integers(2))
    settings = {"num_classes": 2, "quantize_nf4": nf4, "double_quantize": nf4 and double}
    spoiled = {f"{name}, {settings}": NOT_FINITE[name]}
    return [
        *_refuses(trial, CHECKPOINT, CHECKPOINT_DAMAGE, trial.files.load_decoder),
        *_refuses(trial, CHECKPOINT, spoiled, lambda folder: trial.classifiers.fresh(folder, settings, ["date"])),
        *_refused_by_its_header(trial),
        *_changed(trial),
    ]


def _refused_by_its_header(trial: Trial) -> Iterator[Comparison]:
    """Weights that are not the model's are refused by what the file's header says of them, and not read."""
    size, stored = 2**26, (CHECKPOINT / WEIGHTS).read_bytes()
    weights = 8 + int.from_bytes(stored[:8], "little")
    end = len(stored) - weights
    surplus = {"dtype": "F32", "shape": [size // 4], "data_offsets": [end, end + size]}
    header = json.dumps(json.loads(stored[8:weights]) | {"surplus": surplus}).encode()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(CHECKPOINT, Path(parent) / "large"))
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + stored[weights:])
        os.truncate(folder / WEIGHTS, 8 + len(header) + end + size)
        refuses = partial(trial.refuses, "a large tensor too many", partial(trial.files.load_decoder, folder), "surplus", "ValueError")
        yield refuses()
        yield value_at_most("share of a large file of weights in memory while it is refused", most_held(refuses) / size, 0.3)


def _changed(trial: Trial) -> list[Comparison]:
    model = generated(trial.rng("changed"), trial.seed, "float32")
    with tempfile.TemporaryDirectory() as parent:
        base = model.write_checkpoint(Path(parent) / "base")
        return list(changed_meanwhile(trial, base, base / WEIGHTS))


def changed_meanwhile(trial: Trial, model: Path, file: Path) -> Iterator[Comparison]:
    """A model one of whose files is written, replaced, cut or removed once its header was read, after it was opened, or as a tensor is
    read: it is refused by that file's name. It is read where nothing but the rights of the file has changed, or an
    equal copy of its time is in its place.

    What is written differs by a nanosecond in its time alone, later or earlier, and what is cut in its size alone. What the system says of
    a file that it cannot open is said again.
    """
    stored, other = file.read_bytes(), file.with_name("another")

    def written(content: bytes, later: int, into: Path = file) -> None:
        into.write_bytes(content)
        os.utime(into, ns=(MOMENT, MOMENT + later))
        into.replace(file)

    changes: dict[str, Callable[[], None]] = {f"written {later} ns later": partial(written, stored, later) for later in (1, -1)}
    changes |= {"replaced": partial(written, stored, 1, other), "cut": partial(written, stored[:-1], 0)}
    for name, change in {**changes, "removed": file.unlink}.items():
        moments: dict[str, dict[str, Any]] = {"after it was opened": {}, "as a tensor is read": {"late": file}}
        for when, moment in {**moments, "once its header was read": {"early": file}}.items():
            written(stored, 0)
            ask = partial(trial.files.read_checkpoint, model, meanwhile=change, **moment)
            # Before it was opened the file's checksum, or that it is not there, may show it first.
            refused = (file.name, "ValueError|OSError") if "early" in moment else (f"{file.name}.*changed", "ValueError")
            yield trial.refuses(f"{name} {when}", ask, *refused)
    file.write_bytes(stored)
    for code in (errno.EMFILE, errno.EIO):

        def fail(error: OSError) -> NoReturn:
            raise error

        ask = partial(trial.files.read_checkpoint, model, meanwhile=partial(fail, OSError(code, os.strerror(code))), late=file)
        yield trial.refuses(f"{errno.errorcode[code]} as a tensor is read", ask, re.escape(os.strerror(code)), "OSError")
    whole = trial.files.read_checkpoint(model)
    yield from same(f"{file.name} with other rights", whole, trial.files.read_checkpoint(model, meanwhile=partial(file.chmod, 0o600)))

    def copied() -> None:
        shutil.copy2(file, other)
        other.replace(file)

    yield from same(f"{file.name}, an equal copy of its time in its place", whole, trial.files.read_checkpoint(model, meanwhile=copied))


def refuses_tokenizer(trial: Trial) -> list[Comparison]:
    """A folder is refused without tokenizer.json, and with a part of it."""
    return list(_refuses(trial, CHECKPOINT, TOKENIZER_DAMAGE, trial.files.load_tokenizer))


def refuses_adapter(trial: Trial) -> Iterator[Comparison]:
    """Each damage of an adapter of PEFT's is refused by file and key, and so are bases that it was not trained on."""
    model = replace(generated(trial.rng("model"), trial.seed, "float32", nf4=False, factor=1.0, layers=2, targets="q_v"), config={})
    with tempfile.TemporaryDirectory() as parent:
        base, theirs = model.write_checkpoint(Path(parent) / "base"), model.write_peft(Path(parent) / "theirs")
        damaged = _refuses(trial, theirs, ADAPTER_DAMAGE, lambda folder: trial.files.load_adapter(folder, base))
        bases = list(_refuses_other_bases(trial, model, Path(parent)))
        yield from damaged
        yield from bases
        yield from _refuses(trial, Path(parent) / "ours", EDITS, lambda folder: trial.files.load_adapter(folder, base))


def _refuses_other_bases(trial: Trial, model: Model, parent: Path) -> Iterator[Comparison]:
    """Bases whose architecture has one thing another, of a real number the next that there is, and what shapes do not show in both
    directions; and of which nothing that counts has.
    """
    trial.files.save_adapter(parent / "ours", parent / "base", model.settings, model.trainable)
    base, other, turned = json.loads((parent / "base" / CONFIG).read_text()), parent / "another base", parent / "turned"
    other.mkdir()
    for name, (adapter, message, change) in OTHER_BASES.items():
        (other / CONFIG).write_text(json.dumps({**base, **change(base)}))
        if name in ("epsilon", "theta", "vocabulary"):  # the adapter's own number comes first
            ((key, value),) = change(base).items()
            message += rf".*{re.escape(repr(base[key]))}\b.*{re.escape(repr(value))}\b"
        yield trial.refuses(f"another {name}", partial(trial.files.load_adapter, parent / adapter, other), message)
        if adapter == "ours":
            trial.files.save_adapter(turned, other, model.settings, model.trainable)
            message = OTHER_BASES[name][1]
            yield trial.refuses(f"another {name}, turned", partial(trial.files.load_adapter, turned, parent / "base"), message)
    (other / CONFIG).write_text(json.dumps({**base, **_scaled()}))
    trial.files.save_adapter(turned, other, model.settings, model.trainable)
    for name, value in SCALED.items():
        (other / CONFIG).write_text(json.dumps({**base, **_scaled(**{name: _next(value)})}))
        yield trial.refuses(f"another {name}", partial(trial.files.load_adapter, turned, other), f"{BESIDE}.*rope_scaling")
    (other / CONFIG).write_text(
        json.dumps({**base, "max_position_embeddings": 1024, "tie_word_embeddings": not base["tie_word_embeddings"]})
    )
    trial.files.load_adapter(parent / "ours", other)  # a classifier computes with neither
    for kind in (float, int):  # other writers of JSON leave out the point of a whole number
        (other / CONFIG).write_text(json.dumps({**base, **_scaled(**{name: kind(value) for name, value in WHOLE.items()})}))
        if kind is float:
            trial.files.save_adapter(turned, other, model.settings, model.trainable)
        trial.files.load_adapter(turned, other)


WHOLE = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
"""Numbers of scaled rotary frequencies as the usual models have them."""


def _scaled(**others: float) -> dict[str, Any]:
    """Scaled rotary frequencies in a config.json, by the numbers of SCALED or others."""
    return {"rope_scaling": {"rope_type": "llama3", **{key: {**SCALED, **others}[name] for name, key in SCALING.items()}}}


def _next(value: float) -> float:
    return value + 1 if isinstance(value, int) else float(np.nextafter(value, np.inf))


def _refuses(trial: Trial, whole: Path, damages: Mapping[str, Damage], ask: Callable[[Path], object]) -> Iterator[Comparison]:
    """A copy of the folder with each damage in turn: what the refusal names, and that the copy is left as it is."""
    rng, stored = trial.rng("damage"), content(whole)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(whole, Path(parent) / whole.name))
        for name, damage in damages.items():
            message = damage(folder, rng)
            before = content(folder)
            yield trial.refuses(name, partial(ask, folder), message)
            after = content(folder)
            if after != before:
                yield broken(name, "the folder was changed")
            _restore(folder, stored, after)


def _restore(folder: Path, stored: Mapping[str, bytes], now: Mapping[str, bytes]) -> None:
    """The files that are not as stored are written anew: a copy of the whole folder for each damage would take most of the time."""
    for name in now.keys() - stored.keys():
        (folder / name).unlink()
    for name, value in stored.items():
        if now.get(name) != value:
            (folder / name).unlink(missing_ok=True)  # the file may be mapped
            (folder / name).write_bytes(value)


NO_DEVICES = (
    *(
        "cuda:16",
        "cuda:256",
        "xpu:513",
        "cuda:4294967296",
        "cuda:-1",
        "cuda:",
        "cuda:0x1",
        "cuda:0\n",
        "cuda:\u0661",
        "cuda:1\u0661",
    ),
    *("", "gpu", "auto:0", "mps:16", "meta"),
)


SPELLED = {"cuda:01": "cuda:1", "CUDA": "cuda", "cpu:0": "cpu", " cpu": "cpu"}
"""Names that are not in the grammar, and those that they look like."""


def refuses_device(trial: Trial) -> list[Comparison]:
    """Names outside the grammar are refused, and accelerators of a kind of which there is none; another spelling of a name is refused, or
    is its device."""
    import torch

    here = torch.accelerator.current_accelerator(check_available=True)
    kinds = {here.type, "hip" if torch.version.hip else here.type} if here else set()
    absent = [kind for kind in ("cuda", "xpu", "mps", "hip") if kind not in kinds]
    refused = {
        **dict.fromkeys(NO_DEVICES, "ValueError"),
        **{f"{kind}{index}": "DeviceUnavailable" for kind in absent for index in ("", ":0")},
    }
    found = [trial.refuses(repr(name), partial(trial.devices.resolve, name), "device", error) for name, error in refused.items()]
    return found + [each for odd, name in SPELLED.items() for each in _spelled(trial, odd, name)]


def _spelled(trial: Trial, odd: str, name: str) -> list[Comparison]:
    ask = partial(trial.devices.resolve, odd)
    try:
        given = ask()
    except SubjectError as error:
        unavailable = type(error.__cause__).__name__ == "DeviceUnavailable" and name != "cpu"
        return [trial.refuses(repr(odd), ask, "device", "DeviceUnavailable" if unavailable else "ValueError")]
    return same(repr(odd), *(each.removesuffix(":0") for each in (trial.devices.resolve(name), given)))
