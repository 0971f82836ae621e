"""Adapters and checkpoints as a subject saves and loads them: files held to NumPy and JSON, logits to the reference."""

import hashlib
import json
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
from safetensors.numpy import load_file, save, save_file

from blackswan import reference
from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric.answers import SubjectError
from blackswan.falsifiers.numeric.case import Case
from blackswan.falsifiers.numeric.comparison import Comparison, broken
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.numeric.precision import STORAGE
from blackswan.falsifiers.subjects.doors.files import PreparedHead
from blackswan.falsifiers.system import config_files
from blackswan.falsifiers.system.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BESIDE,
    CONFIG,
    HEAD,
    OF_EARLIER_PEFT,
    PREFIX,
    WEIGHTS,
    Model,
    base_weight,
    generated,
    projections,
    read_adapter,
    shipped,
    target_modules,
)
from blackswan.falsifiers.system.apr_spellings import CLASSES
from blackswan.falsifiers.system.same import content, same, same_keys, same_tensors
from blackswan.falsifiers.system.trial import Rounded, Trial, reads_files
from blackswan.reference.table import Array, Arrays, Table

EMBEDDING = "model.embed_tokens.weight"
OF_BASE = {EMBEDDING: "0123456789abcdef"}
"""Checksums that are saved beside an adapter; nobody looks at them who has its base."""
DTYPES = ("float32", "bfloat16", "float16", "float64")
LARGE = {"vocab": 9_001, "hidden": 32}
"""Sizes of a model whose embedding takes more than a MiB in float32."""
MANY = {"vocab": 33_001, "hidden": 64}
"""Sizes of one whose embedding has more than 2²¹ numbers."""
UNEVEN = {"heads": 3, "kv_heads": 1, "head_dim": 8}
"""Heads that do not share out the hidden size: config.json says their own size."""
NOTE = {"note": "x" * 2**16}
"""Metadata that make a file's header longer than 16 bits count, as the headers of models with many layers are."""
PEFT_KEYS = {
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
    *("layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r", "rank_pattern"),
    *("revision", "target_modules", "task_type", "use_dora", "use_rslora", "loftq_config", "megatron_config", "megatron_core"),
}
"""A PEFT that does not know a key does not open the file: later versions have more of them."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "task_type": ("SEQ_CLS", None),
    "modules_to_save": (["score"], ["classifier", "score"], ["score", "classifier", "score"]),
    "revision": (None, "main"),
    "lora_dropout": (0.0, 0.1),
    "inference_mode": (True, False),
    "exclude_modules": (None, []),
    "auto_mapping": (None, {"base_model_class": "Qwen2ForSequenceClassification"}),
}
"""What PEFT may say of an adapter without a change of what it computes: the starts leave the base as it is."""


@contextmanager
def saved(
    trial: Trial, model: Model, *, merged: bool = False, default: str = "float32", checksums: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """A folder with the model's checkpoint as `base` and what the subject saves: the `adapter` and, where asked for, `merged`, under that
    default dtype of torch's."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        base = model.write_checkpoint(folder / "base")
        trial.files.save_adapter(folder / "adapter", base, model.settings, model.trainable, checksums=checksums)
        if merged:
            trial.files.merge(folder / "adapter", base, folder / "merged", model.trained_in, default=default)
        yield folder


@reads_files
def adapter_has_pefts_format(trial: Trial) -> list[Comparison]:
    """A saved adapter_model.safetensors has PEFT's names, dtypes and bits, and adapter_config.json PEFT's keys.

    Its tensors are of any dtype, all of one or each of its own, and lie in memory in any order, some in one place; the base may have one of
    more than a MiB. Everybody may open the folder and read the files. What is saved beside it comes back.
    """
    merged, rng = trial.seed % 2 == 0, trial.rng("model")
    pooling = "last" if trial.seed % 4 else str(rng.choice(["mean", "first"]))
    sizes = LARGE if trial.seed % 4 == 0 else {}
    model = generated(rng, trial.seed, "float32", **({"pooling": pooling, "nf4": False, **sizes} if merged else {}))
    dtypes = drawn_dtypes(rng, model)
    model = replace(model, trainable={name: _laid_out(rng, value.astype(dtypes[name])) for name, value in model.trainable.items()})
    model = replace(model, trainable=_some_equal(model.trainable, "lora_A.weight"), decoder=_some_equal(model.decoder, "layernorm.weight"))
    with saved(trial, model, merged=merged, checksums=OF_BASE) as folder:
        stored, config = load_file(folder / "adapter" / ADAPTER_WEIGHTS), read_json(folder / "adapter" / ADAPTER_CONFIG)
        prepared = [each for part in ("adapter", *["merged"] * merged) for each in _prepared(trial, model, folder / part)]
        metadata = has_pt_metadata(folder / "adapter" / ADAPTER_WEIGHTS) + _checksums(folder, merged)
        metadata += same("checksums of the base", OF_BASE, read_json(folder / "adapter" / BESIDE)["checksums"]["base"])
        lora = read_json(folder / "adapter" / BESIDE)["lora"]
        beside = _extra_comes_back(trial, model, folder)
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (folder / "adapter", *(folder / "adapter").iterdir())}
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
        "target_modules": list(target_modules(model)),  # in the order of a block: that of a set is another in each process
    }
    tensors = same_tensors({PREFIX + name: value for name, value in model.trainable.items()}, stored)
    readable = same("modes of folder and files", dict.fromkeys(modes, oct(0o644)) | {"adapter": oct(0o755)}, modes)
    named = model.scalars["targets"].replace("+", ",")  # in the order of a block, as in adapters of before
    own = same(f"updates in {BESIDE}", {**{name: model.scalars[name] for name in ("rank", "alpha")}, "targets": named}, lora)
    keys = same(f"keys of {ADAPTER_CONFIG} that earlier versions of PEFT do not know", [], sorted(config.keys() - PEFT_KEYS))
    return keys + same_keys(ADAPTER_CONFIG, said, config) + tensors + metadata + readable + own + prepared + beside


def _extra_comes_back(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """An adapter's further content comes back as JSON has it, also where its keys are numbers, of two digits too, or of several types, or
    its texts of any letters; or it is refused, and nothing is written, nor is an adapter lost that was there. So it is with what
    JSON lacks, with numbers that are none, and with keys that are one in JSON, which could not be read again; with tensors that are not
    finite, or of whole numbers; and with an alpha or a pooling that there is not. The digest is that of all that blackswan.json says, as it
    always was."""
    labels: dict[Any, Any] = {number: f"class {number}" for number in range(11)}
    rng = trial.rng("extra")
    extras: list[Any] = [labels, [labels | {"a": (1, 2.5), None: True, 0.5: None}], {"名": "Größe \U0001f600 \x7f\n"}]
    odd: list[Any] = [float("nan"), [{"a": float("inf")}], {1: "a", "1": "a"}, {"a": {None: 1, "null": 2}}]
    foreign = [np.float32(0.5), np.arange(3), {"a"}, Path("a")]
    drawn = [{"of": each} for each in (*extras, odd[int(rng.integers(len(odd)))], foreign[int(rng.integers(len(foreign)))])]
    found = [each for extra in drawn for each in _read_again(trial, model, folder, extra)]
    name, number = str(rng.choice(sorted(model.trainable))), float(rng.choice([np.nan, np.inf, -np.inf]))
    for value in (np.full_like(model.trainable[name], number), model.trainable[name].astype(np.int32)):
        found += _read_again(trial, replace(model, trainable=model.trainable | {name: value}), folder)
    unusual: dict[str, Any] = {"alpha": float(rng.choice([np.nan, np.inf, -1.0, 0.0, 1e31])), "pooling": "max"}
    return found + [
        each for key in unusual for each in _read_again(trial, replace(model, scalars=model.scalars | {key: unusual[key]}), folder)
    ]


def _read_again(trial: Trial, model: Model, folder: Path, extra: Mapping[str, Any] | None = None) -> list[Comparison]:
    """An adapter that is saved in the place of another one is read again, or it is refused and nothing has changed."""
    place = folder / "extra"
    before = sorted(map(str, folder.rglob("*"))), content(place)
    try:
        trial.files.save_adapter(place, folder / "base", model.settings, model.trainable, extra=extra)
    except SubjectError as error:
        if not isinstance(error.__cause__, TypeError | ValueError):
            raise
        after = sorted(map(str, folder.rglob("*"))), content(place)
        hidden = re.search(rf"{re.escape(str(folder))}/\.[^:]*", str(error.__cause__))  # which is not there any more
        found = same("folder that a refusal names and nobody has asked for", None, hidden and hidden[0])
        return found + same("what is there after what was to be saved was refused", before, after)
    default = str(trial.rng("default device").choice(["meta", "cpu"]))
    back = trial.files.load_adapter(place, folder / "base", default)
    said = read_json(place / BESIDE)
    digest = said.pop("digest")
    found = same(f"digest in {BESIDE}", hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest(), digest)
    return found + (same("what else was saved", json.loads(json.dumps(extra, default=_in_json)), back.extra) if extra else [])


def _in_json(value: Any) -> Any:
    """Numbers and arrays of NumPy's as JSON has them; whatever else it lacks comes back as nothing of JSON's."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else {"lost": type(value).__name__}


def drawn_dtypes(rng: Generator, model: Model) -> dict[str, np.dtype[Any]]:
    """The dtype in which each tensor of an adapter is stored: one for all of them, or one for each."""
    drawn, several = rng.choice(DTYPES, len(model.trainable)), bool(rng.integers(2))
    return {name: np.dtype(STORAGE[str(drawn[place * several])]) for place, name in enumerate(model.trainable)}


def _laid_out(rng: Generator, value: Array) -> Array:
    """The same numbers, in memory row by row, column by column, or with others between them."""
    return (value, np.asfortranarray(value), np.stack([value, value], axis=-1)[..., 0])[int(rng.integers(3))]


def _some_equal(tensors: Arrays, of: str) -> dict[str, Array]:
    """The tensors, those of that end of their names and of the first one's shape equal to it: a door may hold these in one memory."""
    first = next(value for name, value in tensors.items() if name.endswith(of))
    return {name: first if name.endswith(of) and value.shape == first.shape else value for name, value in tensors.items()}


def _checksums(folder: Path, merged: bool) -> list[Comparison]:
    """blackswan.json has 16 digits of SHA-256 over dtype, shape and bytes of each tensor, as it always had."""
    files = {"adapter": (("tensors", ADAPTER_WEIGHTS),), "merged": (("tensors", HEAD), ("base", WEIGHTS))}
    found = []
    for part in ("adapter", *["merged"] * merged):
        kept = read_json(folder / part / BESIDE)["checksums"]
        for group, file in files[part]:
            tensors = {name.removeprefix(PREFIX): value for name, value in load_file(folder / part / file).items()}
            own = {name: f"torch.{value.dtype.name} {list(value.shape)}\n".encode() + value.tobytes() for name, value in tensors.items()}
            digests = {name: hashlib.sha256(each).hexdigest()[:16] for name, each in own.items()}
            found += same(f"checksums of {part}, {group}", digests, kept[group])
    return found


def _prepared(trial: Trial, model: Model, folder: Path) -> list[Comparison]:
    """transformers' classes are given the head, bias and all, in their dtype, of an adapter or a merged checkpoint, where the
    model is; those pool the last token, and another pooling is refused of either, as is a file that has lost the head.
    """
    dtype = str(trial.rng("prepared").choice(["float32", "bfloat16", "float16"]))
    advised = "prepare_sequence_classifier" in read_json(folder / BESIDE)["transformers"]
    told = same(f"whether {BESIDE} says how transformers' get the head", model.scalars["pooling"] == "last", advised)
    ask = partial(trial.files.prepared_head, folder, model.scalars["hidden"], dtype)
    (folder / BESIDE).rename(folder / "away")
    told.append(trial.refuses(f"head of {folder.name} without {BESIDE}", ask, BESIDE, "FileNotFoundError"))
    (folder / "away").rename(folder / BESIDE)
    if model.scalars["pooling"] != "last":
        return [*told, trial.refuses(f"head of {folder.name} for another pooling", ask, f"{BESIDE}.*pooling", "ValueError")]
    weight, bias = (model.trainable[name].astype(STORAGE[dtype]) for name in ("score.weight", "score.bias"))
    count = len(bias)
    wider = partial(trial.files.prepared_head, folder, model.scalars["hidden"] + 1)
    refused = [*told, trial.refuses("a model of another width", wider, f"{model.scalars['hidden']} inputs", "ValueError")]
    for kind in ("no", "no linear"):
        headless = partial(trial.files.prepared_without_a_head, folder, model.scalars["hidden"], kind)
        refused.append(trial.refuses(f"a model of {kind} score", headless, "score", "ValueError"))
    refused += _misshapen_heads(trial, model, folder)
    refused.append(_without_a_head(trial, model, folder))
    bare = model.write_peft(folder.with_name(f"bare {folder.name}"), head_bias=False)
    given = trial.files.prepared_head(bare, model.scalars["hidden"], dtype)
    refused += same("head without a bias for transformers", PreparedHead(weight, np.zeros_like(bias), count, count, count), given)
    found = ask()
    dtypes = same("dtype of the head for transformers", dtype, str(found.weight.dtype))
    dtypes += same("place of the head for transformers", ["meta", "meta"], trial.files.prepared_places(folder, model.scalars["hidden"]))
    return [*refused, *dtypes, *same("head for transformers", PreparedHead(weight, bias, count, count, count), found)]


def _misshapen_heads(trial: Trial, model: Model, folder: Path) -> Iterator[Comparison]:
    """A head of one dimension, of none or of three, and a bias of another length or of two, are refused by file and tensor."""
    file = folder / (HEAD if (folder / HEAD).is_file() else ADAPTER_WEIGHTS)
    whole, stored = file.read_bytes(), load_file(file)
    ask = partial(trial.files.prepared_head, folder, model.scalars["hidden"])
    weight, bias = (next(name for name in stored if name.endswith(end)) for end in ("score.weight", "score.bias"))
    values = [(weight, stored[weight][place]) for place in (0, (0, 0), None)] + [(bias, stored[bias][:-1]), (bias, stored[bias][None])]
    for name, value in values:
        end = name.removeprefix(PREFIX)
        file.write_bytes(save({**stored, name: np.array(value)}))
        yield trial.refuses(
            f"{end} of shape {np.shape(value)} of {folder.name}", ask, rf"{re.escape(file.name)}.*{re.escape(end)}", "ValueError"
        )
    file.write_bytes(whole)


def _without_a_head(trial: Trial, model: Model, folder: Path) -> Comparison:
    """A file whose head was not saved is refused by its name and that of the tensor."""
    lost = Path(shutil.copytree(folder, folder.with_name(f"headless {folder.name}")))
    stored = {file: load_file(file) for file in lost.glob("*.safetensors")}
    file, tensors = next((file, each) for file, each in stored.items() if any(name.endswith("score.weight") for name in each))
    save_file({name: value for name, value in tensors.items() if not name.endswith("score.weight")}, file)
    ask = partial(trial.files.prepared_head, lost, model.scalars["hidden"])
    return trial.refuses(f"head of {lost.name}", ask, rf"{re.escape(file.name)}.*score\.weight", "ValueError")


def has_pt_metadata(file: Path) -> list[Comparison]:
    """A safetensors file says `pt` of itself: transformers opens none that does not."""
    with safe_open(file, "np") as opened:
        return same(f"{file.name}, metadata", {"format": "pt"}, opened.metadata())


def adapter_arrives_exactly(trial: Trial) -> list[Comparison]:
    """An adapter written as PEFT writes it, in any float dtypes, its targets by names, paths or their last parts, with or without a head
    bias, by an early version of PEFT too, with whatever start or place of training that changes nothing, arrives with tensors and
    settings, and stays as it is when its file is written over; training goes on in float32 or float64."""
    rng = trial.rng("model")
    rank = {"rank": int(rng.integers(257, 600))} if trial.seed % 4 == 0 else {}
    model = generated(rng, trial.seed, "float32", nf4=False, pooling="last", **rank)
    dtypes, head_bias = drawn_dtypes(rng, model), bool(rng.integers(2))
    factor = str(rng.choice([name for name in model.trainable if "lora_A" in name]))
    model.trainable[factor][:] = 5e4 if dtypes[factor] == np.float16 else 2e38  # their sum is infinite in 16 and in 32 bits
    with tempfile.TemporaryDirectory() as folder:
        neutral = {key: values[int(rng.integers(len(values)))] for key, values in NEUTRAL.items()}
        known = OF_EARLIER_PEFT if trial.seed % 3 == 0 else None
        written = model.write_peft(Path(folder) / "peft", dtypes, head_bias, parts=int(rng.integers(3)), known=known, **neutral)
        default = str(rng.choice(["meta", "cpu"]))
        found = trial.files.load_adapter(written, base := model.write_checkpoint(Path(folder) / "base"), default)
        own = str(rng.choice(["float32", "bfloat16", "float64"]))
        trained = trial.files.trained_dtypes(written, base, own)
        with (written / ADAPTER_WEIGHTS).open("r+b") as file:  # what was loaded stays as it is
            file.write(bytes((written / ADAPTER_WEIGHTS).stat().st_size))
    masters = same(f"dtypes of an adapter that is trained in {own}", ["float64" if own == "float64" else "float32"], trained)
    expected = {name: value.astype(dtypes[name]) for name, value in model.trainable.items()}
    if not head_bias:
        expected["score.bias"] = np.zeros(model.scalars["classes"], dtypes["score.weight"])
    masters += same("what else is with an adapter of PEFT's", {}, dict(found.extra))
    return masters + same_keys("settings", asdict(model.settings), asdict(found.settings)) + same_tensors(expected, found.tensors)


@reads_files
def saved_adapter_gives_the_logits(trial: Trial) -> Iterator[Comparison]:
    """The reference's logits of a saved adapter's files are exactly the model's, and the subject's are so within noise.

    This is asked on the shipped checkpoint and on small random ones, in a fourth of the cases of eleven layers, the architecture of each
    spelled in a way of its own.
    """
    rng = trial.rng("model")
    drawn = [generated(rng, trial.seed, "float32", **sizes) for sizes in ({}, {"layers": 11} if trial.seed % 4 == 0 else {}, UNEVEN)]
    drawn[-1] = replace(drawn[-1], config=config_files.beside_nothing(drawn[-1].scalars))
    for model in (shipped(rng, trial.seed), *drawn):
        with saved(trial, model) as folder:
            stored = read_adapter(folder / "adapter", model.scalars)
            actual = trial.files.adapter_logits(folder / "adapter", folder / "base", model.input_ids, model.mask)
        if stored.keys() != model.trainable.keys():
            yield broken("tensors of the file", "names", str(sorted(model.trainable)), str(sorted(stored)))
            return
        files = {**model.inputs(), **{f"parameters/{name}": value for name, value in stored.items()}}
        read = reference.evaluate("classifier_forward", files, model.scalars)["logits"]
        expected = expected_logits(model)
        yield from same("the reference's logits of the files", expected, read)
        yield from within_noise(trial, model, expected, actual, merge=False)


def checkpoint_arrives_exactly(trial: Trial) -> Iterator[Comparison]:
    """Every tensor of the shipped checkpoint is loaded bit for bit, and no other tensor; also where no call reads a whole one.

    Tensors that were loaded stay as they are when the file, an .apr file too, is written over, and one that was written into is read anew.
    They are on the CPU, whichever device is torch's default. Those that are asked for in bfloat16 and then in float32 are rounded.
    """
    stored = load_file(CHECKPOINT / WEIGHTS)
    least = min(value.nbytes for value in stored.values())
    yield from (each for most in (None, least // 2) for each in same_tensors(stored, trial.files.load_decoder(CHECKPOINT, most)))
    names = sorted(stored)[:2]
    narrow = {name: value.astype(STORAGE["bfloat16"]).astype(np.float32) for name, value in stored.items() if name not in names}
    yield from same_tensors(narrow, trial.files.converted(CHECKPOINT, names, "bfloat16", "float32"))
    yield from same("names that a checkpoint has", [True, False], trial.files.names_alone(CHECKPOINT, [EMBEDDING, "surplus"]))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(CHECKPOINT, Path(folder) / "copy"))
        trial.files.export(copy, apr := Path(folder) / "copy.apr")
        kept = [trial.files.load_decoder(copy), trial.files.read_checkpoint(copy), trial.files.read_checkpoint(copy, place="meta")]
        kept += [trial.files.read_checkpoint(apr), *map(trial.files.read_over, (copy, apr))]
        for path in (copy / WEIGHTS, apr):
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
        yield from (each for part in kept for each in same("tensors of a file that was written over", stored, part))


@reads_files
def saved_checkpoint_is_exact(trial: Trial) -> Iterator[Comparison]:
    """A checkpoint that the subject loads and saves keeps its tensors, in the file by NumPy and loaded again, and its architecture.

    Beside a tied embedding its copy may be stored as an output layer, as some writers do, in a wider dtype too; it is no tensor of its
    own, be it large. Tensors may be in several dtypes, as where norms are kept in float32, the folder may be named like a file, and a file
    may have a long header, of any number of bytes. With one number of any tensor that is not finite nothing is saved.
    """
    rng = trial.rng("model")
    large = trial.seed % 6 == 1
    model = generated(rng, trial.seed, "float16", tied=True, **MANY) if large else generated(rng, trial.seed, str(rng.choice(DTYPES)))
    if trial.seed % 2:
        drawn = {name: STORAGE[model.dtype if name == EMBEDDING else str(rng.choice(DTYPES))] for name in model.decoder}
        model = replace(model, decoder={name: value.astype(drawn[name]) for name, value in model.decoder.items()})
    if trial.seed % 4 == 2:  # elsewhere no two are equal, by which one could stand for another
        model = replace(model, decoder=_some_equal(model.decoder, "layernorm.weight"))
    positions = {"max_position_embeddings": int(rng.integers(1, 2**20))}
    model = replace(model, config={**model.config, **positions})
    with tempfile.TemporaryDirectory() as parent:
        base, copy = model.write_checkpoint(Path(parent) / str(rng.choice(["base", "base.apr"]))), Path(parent) / "copy"
        copied = model.scalars["tied"] and (large or rng.integers(4))
        twin = {"lm_head.weight": _perhaps_wider(rng, model.decoder[EMBEDDING], large)} if copied else {}
        save_file(model.decoder | twin, base / WEIGHTS, NOTE if rng.integers(2) else None)
        _rewritten(base / WEIGHTS, int(rng.integers(8)), rng)
        loaded, said = trial.files.copy_checkpoint(base, copy), read_json(copy / CONFIG)
        stored, architectures = load_file(copy / WEIGHTS), [config_files.said(read_json(each / CONFIG)) for each in (base, copy)]
        spoiled = [*has_pt_metadata(copy / WEIGHTS), *_not_saved(trial, model, Path(parent))]
        elder = config_files.said({key: value for key, value in read_json(copy / CONFIG).items() if key != "rope_parameters"})
    yield from same(CONFIG, *architectures)
    yield from same(f"{CONFIG} as transformers 4 reads it", architectures[0], elder)
    yield from same(f"rope_theta of {CONFIG}, which transformers 4 reads by itself", architectures[0]["theta"], said.get("rope_theta"))
    yield from same_keys(CONFIG, {"dtype": model.dtype, "architectures": [CLASSES[model.scalars["family"]]], **positions}, said)
    yield from same_tensors(model.decoder, stored)
    yield from same_tensors(model.decoder, loaded)
    yield from spoiled


def _perhaps_wider(rng: np.random.Generator, value: Array, large: bool) -> Array:
    """The tensor, or as of a large one always one of the same numbers in float64."""
    return value.astype(np.float64) if large or rng.integers(2) else value


def _rewritten(file: Path, spaces: int, rng: Generator) -> None:
    """Gives a safetensors file a header that ends with so many spaces, for writers need not bring it to a multiple of eight bytes, and that
    names the tensors in another order than they lie in."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    entries = list(json.loads(content[8:end]).items())
    header = json.dumps(dict(entries[place] for place in rng.permutation(len(entries)))).encode() + b" " * spaces
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def _not_saved(trial: Trial, model: Model, parent: Path) -> list[Comparison]:
    """A vector and a matrix of which one number is not finite are refused by their names, and no folder is there afterwards."""
    rng, found, place = trial.rng("not finite"), list[Comparison](), parent / "spoiled"
    for ndim in (1, 2):
        name = str(rng.choice([name for name, value in model.decoder.items() if value.ndim == ndim]))
        if ndim == 2 and model.decoder[EMBEDDING].size > 2**21:  # whose last part may be looked at by itself
            name = EMBEDDING
        value = model.decoder[name].copy()
        value.flat[-1 if value.size > 2**21 else rng.integers(value.size)] = rng.choice([np.nan, np.inf, -np.inf])
        base = replace(model, decoder={**model.decoder, name: value}).write_checkpoint(parent / f"base with a bad {name}")
        ask = partial(trial.files.copy_checkpoint, base, place)
        found.append(trial.refuses(f"a checkpoint that is not finite in {name}", ask, re.escape(name), "ValueError"))
        found += same(f"folder of what has a bad {name}", [], sorted(path.name for path in parent.glob("*spoiled*")))
    return found


def expected_logits(model: Model) -> Array:
    """The reference's logits of the classifier, its updates beside the base weights."""
    return np.asarray(reference.evaluate("classifier_forward", model.inputs(), model.scalars)["logits"])


def within_noise(trial: Trial, model: Model, expected: Array, actual: Array, *, merge: bool) -> list[Comparison]:
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of JSON."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
