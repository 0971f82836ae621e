"""Models in `.apr` files: what is read from them, held to the same weights in a Hugging Face folder; and what is written."""

import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from blackswan.falsifiers.data import CHECKPOINT
from blackswan.falsifiers.numeric import apr_format
from blackswan.falsifiers.numeric.apr_format import BLOCKS, CODES, DTYPES, PLAIN, ROW_MAJOR, Image, Stored, plain
from blackswan.falsifiers.numeric.comparison import Comparison, broken, compare_exactly, value_at_most
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.subjects.doors.files import CorpusFile, Tokenizing
from blackswan.falsifiers.system import apr_spellings, config_files
from blackswan.falsifiers.system.adapter_files import CONFIG, TOKENIZER, WEIGHTS, Model, generated
from blackswan.falsifiers.system.footprint import most_held
from blackswan.falsifiers.system.fresh import DEFAULTS
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial, reads_files
from blackswan.reference.table import Array

EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"
ODD = {"vocab": 33, "hidden": 20}
"""A model whose embedding ends within a block."""
LONG = {"vocab": 26_501, "hidden": 40}
"""A model whose embedding has more than 2²⁰ numbers, more than are worked off at a time, and ends within a block of 32, as its rows do."""
WIDE = {"vocab": 2_101, "hidden": 576, "intermediate": 2_101}
"""One of several tensors as large, whose rows take two blocks of 256 and a part of one."""
OF_LARGE = {EMBEDDING: "AprQ8", UP: "Q4_K", UP.replace("up", "gate"): "Q6_K"}
SPECIALS: tuple[dict[str, Any], ...] = (
    {"bos_token_id": 4, "eos_token_id": 5, "pad_token_id": 6},
    {"bos_token_id": 4, "eos_token_id": [5, 2], "pad_token_id": 0},
)
"""One token that ends texts; and two of them, as models that chat have, beside one whose id is 0."""
KEYS = {"bos_token_id": "tokenizer.bos_token_id", "eos_token_id": "tokenizer.eos_token_id", "pad_token_id": "tokenizer.padding_token_id"}
OF_A_WRITER = tuple({"rope_type": 2} | {KEYS[key]: value for key, value in special.items()} for special in SPECIALS)
"""What a file says beside the architecture: 2 means that the halves of a head turn together, as Hugging Face's do."""
SHORT = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
OF_HALVES = {"rope_type": 2}
ROPE_TYPES: tuple[dict[str, Any], ...] = ({"rope_type": 0}, {}, {"rope_type": None}, {"rope_type": 1})
"""What else a file may say of it: writers say 0 of rows in either order."""


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder that goes when the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def metadata(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """What a file says of a decoder's architecture, by the first of the format's keys."""
    found = {"architecture": scalars["family"], "hidden_size": scalars["hidden"], "num_layers": scalars["layers"]}
    found |= {"num_heads": scalars["heads"], "num_kv_heads": scalars["kv_heads"], "head_dim": scalars["head_dim"]}
    found |= {"vocab_size": scalars["vocab"], "intermediate_size": scalars["intermediate"], "max_position_embeddings": 512}
    return found | {"rope_theta": scalars["theta"], "rms_norm_eps": scalars["eps"]}


def image(said: Mapping[str, Any], tensors: Sequence[Stored], **changes: Any) -> Image:
    """A file whose index is in the order of names."""
    return Image(said, sorted(tensors, key=lambda each: each.name.encode()), **changes)


def same_bits(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> list[Comparison]:
    """The same names, and under each the same dtype, shape and bits."""
    if expected.keys() != actual.keys():
        return [broken("names", "differ", None, ", ".join(sorted(expected.keys() ^ actual.keys())))]
    found = []
    for name, value in expected.items():
        found += same(f"dtype of {name}", str(value.dtype), str(actual[name].dtype))
        if found[-1].held:
            found.append(compare_exactly(name, _bits(value), _bits(actual[name])))
    return found


def _bits(value: Array) -> Array:
    return np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}")


def drawn(trial: Trial, **fixed: Any) -> Model:
    """A model in float32 with nothing beside its weights, of random sizes."""
    return replace(generated(trial.rng("model"), trial.seed, "float32", nf4=False, factor=1.0, **fixed), config={})


def _reads_alike(trial: Trial, folder: Path, model: Model, file: Image) -> list[Comparison]:
    """Tensors and logits of a file against those of a folder with the model's decoder, and the architecture, which both must say alike."""
    base, path = model.write_checkpoint(folder / "base"), folder / "model.apr"
    path.write_bytes(file.pack())
    adapter = model.write_peft(folder / "adapter")
    wanted, got = (trial.files.adapter_logits(adapter, each, model.input_ids, model.mask) for each in (base, path))
    trial.pretrainer.initial(base, path)
    read = trial.files.read_checkpoint(path, default=DEFAULTS[trial.seed % len(DEFAULTS)], place="meta")
    return [*same_bits(model.decoder, read), compare_exactly("logits", _bits(wanted), _bits(got))]


@reads_files
def equals_safetensors(trial: Trial) -> Iterator[Comparison]:
    """F32, F16 and BF16, mixed; metadata by any of its names, contents in any order, vectors as rows, tensors of a training run, any
    rope_type."""
    rng, model = trial.rng("file"), drawn(trial)
    positions = {"max_position_embeddings": int(rng.choice([512, apr_spellings.POSITIONS, 4 * apr_spellings.POSITIONS]))}
    chosen, model = mixed(rng, replace(model, config=config_files.plain(model.scalars) | SPECIALS[trial.seed % 2] | positions))
    stored = [plain(name, value, chosen[name]) for name, value in model.decoder.items()]
    rows = [replace(each, shape=(1, *each.shape)) if len(each.shape) == 1 and rng.integers(2) else each for each in stored]
    own = [Stored("__training__.step", CODES["I64"], (1,), bytes(8)), plain("__training__.m", np.ones(3), "F32")]
    said = (
        apr_spellings.spelled(rng, metadata(model.scalars) | positions)
        | OF_A_WRITER[trial.seed % 2]
        | (OF_HALVES, *ROPE_TYPES)[int(rng.integers(5))]
    )
    order = [int(place) for place in rng.permutation(len(rows) + len(own))]
    file = image(said, rows + own, order=order, header={"flags": apr_spellings.flags(rng)}, footer=bool(rng.integers(2)))
    with new_folder() as folder:
        yield from _reads_alike(trial, folder, model, replace(file, metadata=apr_spellings.text(rng, said)))
        yield from _merges_alike(trial, folder)


def mixed(rng: Generator, model: Model) -> tuple[dict[str, str], Model]:
    """The model with each tensor in a dtype of its own, and these by name."""
    chosen = {name: str(rng.choice(list(PLAIN))) for name in model.decoder}
    return chosen, replace(model, decoder={name: value.astype(PLAIN[chosen[name]]) for name, value in model.decoder.items()})


def _merges_alike(trial: Trial, folder: Path) -> list[Comparison]:
    """An adapter is merged into the file as it is into the folder, and the special tokens are those of either."""
    merged = [folder / "merged folder", folder / "merged file"]
    for base, each in zip(("base", "model.apr"), merged, strict=True):
        trial.files.merge(folder / "adapter", folder / base, each)
    configs = [json.loads((each / CONFIG).read_text()) for each in merged]
    found = same("config.json of the merged", *map(config_files.said, configs))
    for config in configs:
        found += same("special tokens of the merged", SPECIALS[trial.seed % 2], {key: config.get(key) for key in KEYS})
    return [*same_bits(*(load_file(each / WEIGHTS) for each in merged)), *found]


def quantised_exact(trial: Trial) -> Iterator[Comparison]:
    """AprQ8, AprQ4, Q4_K and Q6_K of random blocks, with padded rows and without, whole blocks a row or not, few and many; of a Llama also
    under GGUF's names, and then with its order of rows. Large ones are in each of them, and of two the rows are padded."""
    rng, gguf = trial.rng("file"), trial.seed % 3 == 1
    long, wide = trial.seed % 6 == 0, trial.seed % 6 == 3
    sizes = LONG if long else WIDE if wide else (ODD, {"hidden": 32}, {"hidden": 256})[int(rng.integers(3))]
    model = drawn(trial, layers=1, **sizes, **({"family": "llama"} if gguf else {}))
    chosen = {EMBEDDING: "AprQ4"} if long else OF_LARGE if wide else {}
    stored = [_random_blocks(rng, name, value.shape, chosen.get(name)) for name, value in model.decoder.items()]
    model = replace(model, decoder={each.name: apr_format.array(each) for each in stored})
    if gguf:
        rows = {name: _order(apr_format.huggingface_rows, name, value, model.scalars) for name, value in model.decoder.items()}
        model, stored = replace(model, decoder=rows), [replace(each, name=apr_format.gguf_name(each.name)) for each in stored]
    with new_folder() as folder:
        yield from _reads_alike(trial, folder, model, image(metadata(model.scalars), stored))


def _random_blocks(rng: Generator, name: str, shape: tuple[int, ...], chosen: str | None = None) -> Stored:
    """A tensor in a quantised dtype that its shape leaves unambiguous, scales of any sign and some of them subnormal."""
    count, rows = int(np.prod(shape)), int(np.prod(shape[:-1]))
    dtype = chosen or str(rng.choice(["AprQ8", *BLOCKS]))
    codes = [code for code, called in DTYPES.items() if called == dtype]
    if dtype == "AprQ8":
        return Stored(name, int(rng.choice(codes)), shape, np.float32(rng.normal() / 100).tobytes() + rng.bytes(count))
    elements, size = BLOCKS[dtype]
    flat, by_rows = -(-count // elements), rows * -(-shape[-1] // elements)
    if dtype == "AprQ4":
        by_rows = flat
    elif flat == by_rows and rows > 1 and shape[-1] % elements:
        return _random_blocks(rng, name, shape)
    blocks = rng.integers(0, 256, (by_rows if chosen else int(rng.choice([flat, by_rows])), size), dtype=np.uint8)
    for at in {"AprQ4": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}[dtype]:
        scales = rng.normal(size=len(blocks)) * rng.choice([1e-6, 1e-4, 1e-3], len(blocks))
        blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return Stored(name, int(rng.choice(codes)), shape, blocks.tobytes())


def gguf_names(trial: Trial) -> Iterator[Comparison]:
    """Names of GGUF; a Llama's rows of queries and keys in its order, a Qwen's as they are. Of a Llama rope_type 2 contradicts these
    names and is refused; all else that rope_type may say is taken and decides nothing, as it is of a Qwen.
    """
    for family in ("llama", str(trial.rng("family").choice(["qwen2", "qwen3"]))):
        model = drawn(trial, family=family, kv_heads=1, heads=2, layers=1 + 10 * (trial.seed % 3 == 0))
        stored = [_as_gguf(name, value, model.scalars) for name, value in model.decoder.items()]
        with new_folder() as folder:
            yield from _reads_alike(trial, folder, model, image(metadata(model.scalars) | ROPE_TYPES[trial.seed % 3], stored))
            shutil.copyfile(CHECKPOINT / TOKENIZER, folder / f"model.{TOKENIZER}")
            trial.files.export(folder / "model.apr", folder / "written.apr")
            written = trial.files.read_checkpoint(folder / "written.apr")
            yield from (replace(each, tensor=f"{family}, written anew: {each.tensor}") for each in same_bits(model.decoder, written))
            for said in (*ROPE_TYPES, OF_HALVES):
                (folder / "model.apr").write_bytes(image(metadata(model.scalars) | said, stored).pack())
                ask = partial(trial.files.read_checkpoint, folder / "model.apr")
                if said is OF_HALVES and family == "llama":
                    yield trial.refuses("rope_type of other rows", ask, r"model\.apr.*rope_type", "ValueError")
                else:
                    yield from (replace(each, tensor=f"{family}, {said}: {each.tensor}") for each in same_bits(model.decoder, ask()))


def _as_gguf(name: str, value: Array, scalars: Mapping[str, Any]) -> Stored:
    return plain(apr_format.gguf_name(name), _order(apr_format.gguf_rows, name, value, scalars), "F32")


def _order(reorder: Callable[[Array, int], Array], name: str, value: Array, scalars: Mapping[str, Any]) -> Array:
    """A tensor with its rows in another order, where it is a Llama's queries or keys."""
    heads = {"q_proj": scalars["heads"], "k_proj": scalars["kv_heads"]}.get(name.split(".")[-2])
    return reorder(value, heads) if heads and scalars["family"] == "llama" else value


def tied_heads(trial: Trial) -> list[Comparison]:
    """Tied: no output layer, a copy, or an entry without bytes, by GGUF's name too, said to be tied or not, also in a wider dtype.
    Untied: another one, one that differs from the embedding, be it large, by one ulp of one element, one that is rounded to float16, or a
    copy said to be so."""
    tied, own = drawn(trial, tied=True), drawn(trial, tied=False)
    stored = [plain(name, value, "F32") for name, value in tied.decoder.items()]
    copy = plain(HEAD, tied.decoder[EMBEDDING], "F32")
    empty, gguf = replace(copy, content=b""), [_as_gguf(name, value, tied.scalars) for name, value in tied.decoder.items()]
    said = metadata(tied.scalars)
    separate = replace(tied, scalars=tied.scalars | {"tied": False}, decoder=tied.decoder | {HEAD: tied.decoder[EMBEDDING]})
    rounded = replace(separate, decoder=tied.decoder | {HEAD: tied.decoder[EMBEDDING].astype(np.float16)})
    long = drawn(trial, tied=True, **LONG) if trial.seed % 4 == 0 else tied
    near = long.decoder[EMBEDDING].copy()
    near.reshape(-1)[-1:] = np.nextafter(near.reshape(-1)[-1:], np.float32(np.inf))
    nearly = replace(long, scalars=long.scalars | {"tied": False}, decoder=long.decoder | {HEAD: near})
    half = long.decoder[EMBEDDING].astype(np.float16)
    of_half = replace(long, decoder=long.decoder | {EMBEDDING: half})
    wider = [plain(name, value, "F16" if name == EMBEDDING else "F32") for name, value in of_half.decoder.items()]
    wider.append(plain(HEAD, half.astype(np.float32), "F32"))
    cases = {
        **{f"{name}, {what}": (tied, image(said | more, stored + extra))
           for name, extra in (("absent", []), ("copy", [copy]), ("empty", [empty]))
           for what, more in (("not said", {}), ("said", {_by_a_name(trial): True}))},
        **{f"copy in a wider dtype, {what}": (of_half, image(metadata(long.scalars) | more, wider))
           for what, more in (("not said", {}), ("said", {_by_a_name(trial): True}))},
        **{name: (model, image(metadata(model.scalars), [plain(name, value, "F32") for name, value in model.decoder.items()]))
           for name, model in (("different", own), ("one ulp off", nearly))},
        "rounded": (rounded, image(said, [*stored, plain(HEAD, tied.decoder[EMBEDDING], "F16")])),
        "copy of its own": (separate, image(said | {_by_a_name(trial): False}, [*stored, copy])),
        "empty by GGUF's name": (tied, image(said, [*gguf, replace(empty, name=apr_format.gguf_name(HEAD))])),
        **{f"empty at {at}": (tied, image(said, [*stored, replace(empty, offset=at)])) for at in (0, 64, len(copy.content))},
    }  # fmt: skip
    found = []
    for case, (model, file) in cases.items():
        with new_folder() as folder:
            found += [replace(each, tensor=f"{case}: {each.tensor}") for each in _reads_alike(trial, folder, model, file)]
    return found


def _by_a_name(trial: Trial) -> str:
    """What a file calls that the output layer is the embedding, by turns."""
    return apr_spellings.NAMES["tied_embeddings"][trial.seed % 2]


@reads_files
def written_file(trial: Trial) -> Iterator[Comparison]:
    """Each byte of a file that was written from a folder of tensors in several dtypes: header, metadata, index, padding, checksums and
    tensors; and it is read again. A dtype that the format lacks is refused where no other is asked for, and converted where one is."""
    rng, model = trial.rng("file"), drawn(trial, **({0: LONG, 1: {"layers": 11}}.get(trial.seed % 8, {})))
    chosen, model = mixed(rng, replace(model, config=config_files.plain(model.scalars) | SPECIALS[trial.seed % 2]))
    dtype = (None, "float32", "float16", "bfloat16")[int(rng.integers(4))]
    with new_folder() as folder:
        base, path = model.write_checkpoint(folder / "base"), folder / "model.apr"
        shutil.copyfile(CHECKPOINT / TOKENIZER, base / TOKENIZER)
        (base / "vocab.json").symlink_to("nowhere")  # in the place of a file of the tokenizer is none, here and below
        (base / "merges.txt").mkdir()
        (half := folder / f".partial-{path.name}.abcdefgh").mkdir()  # what an export leaves that was killed
        (half / path.name).write_bytes(b"APR")
        trial.files.export(base, path, dtype)
        header, said, stored = apr_format.read(path)
        wanted_metadata = metadata(model.scalars) | OF_A_WRITER[trial.seed % 2] | {"tied_embeddings": model.scalars["tied"]}
        wanted_metadata["hf_architecture"] = apr_spellings.CLASSES[model.scalars["family"]]
        wanted = {name: value.astype(PLAIN[SHORT[dtype] if dtype else chosen[name]]) for name, value in model.decoder.items()}
        yield from _same_layout(path.read_bytes(), header, list(stored.values()))
        yield from same("metadata", wanted_metadata, {key: said.get(key) for key in wanted_metadata})
        yield from same("order of names", sorted(stored, key=str.encode), list(stored))
        yield from same_bits(wanted, {name: apr_format.array(each) for name, each in stored.items()})
        yield from same_bits(wanted, trial.files.read_checkpoint(path))
        yield from same("tokenizer", (base / TOKENIZER).read_text(), path.with_name("model.tokenizer.json").read_text())
        yield from same("files", ["base", "model.apr", "model.tokenizer.json"], sorted(each.name for each in folder.iterdir()))
        trial.pretrainer.initial(base, path)
        trial.files.export(base, folder / "parts.apr", dtype, at_most=len(path.read_bytes()) // 40, default="meta")
        yield from same("file of a system that takes few bytes at a call", path.read_bytes(), (folder / "parts.apr").read_bytes())
        yield trial.refuses("over another", partial(trial.files.export, base, path), "model.apr exists", "FileExistsError")
        yield from _of_other_tensors(trial, base, model.decoder)
        for renames in range(2):
            ask = partial(trial.files.export, base, folder / "half.apr", dtype, renames)
            yield trial.refuses(f"a disk that names {renames} files", ask, r"half\.apr", "OSError")
            yield from same(f"a model without its tokenizer, of {renames} files", False, (folder / "half.apr").exists())
            (folder / "half.tokenizer.json").unlink(missing_ok=True)
        large = replace(model, decoder={name: np.full(value.shape, 5e4, np.float16) for name, value in model.decoder.items()})
        shutil.copyfile(CHECKPOINT / TOKENIZER, large.write_checkpoint(folder / "large") / TOKENIZER)
        trial.files.export(folder / "large", folder / "large.apr")
        yield from same_bits(large.decoder, trial.files.read_checkpoint(folder / "large.apr"))
        yield _written_in_parts(trial, folder)
        double = replace(model, decoder=model.decoder | {EMBEDDING: model.decoder[EMBEDDING].astype(np.float64)})
        ask = partial(trial.files.export, double.write_checkpoint(folder / "double"), folder / "double.apr")
        shutil.copyfile(CHECKPOINT / TOKENIZER, folder / "double" / TOKENIZER)
        yield trial.refuses("float64 as it is", ask, f"{re.escape(EMBEDDING)}.*float64(?!.*q[48])", "ValueError")
        yield from same("files of a refused export", [], [each.name for each in folder.glob("*double*.*")])
        trial.files.export(folder / "double", folder / "double.apr", "float32")
        single = {name: value.astype(np.float32) for name, value in double.decoder.items()}
        yield from same_bits(single, trial.files.read_checkpoint(folder / "double.apr"))


def _written_in_parts(trial: Trial, folder: Path) -> Comparison:
    """Python holds a small share of a file of many tensors while it is written, which may be larger than the memory."""
    long = drawn(trial, vocab=32, hidden=256, intermediate=1024, layers=4)
    shutil.copyfile(CHECKPOINT / TOKENIZER, long.write_checkpoint(folder / "long") / TOKENIZER)
    peak = most_held(partial(trial.files.export, folder / "long", folder / "long.apr"))
    return value_at_most("share of a file in memory while it is written", peak / (folder / "long.apr").stat().st_size, 0.3)


def _of_other_tensors(trial: Trial, base: Path, tensors: Mapping[str, Array]) -> Iterator[Comparison]:
    """Tensors in memory one of which is missing, is not the architecture's or has another shape are refused by its name. Those that lie
    column by column are written as they are by rows."""
    turned = {name: np.asfortranarray(value) for name, value in tensors.items()}
    for place, held in (("rows", tensors), ("columns", turned)):
        trial.files.export(base, base.with_name(f"by {place}.apr"), "float32", tensors=held)
    yield from same("files of tensors by columns", *(base.with_name(f"by {place}.apr").read_bytes() for place in ("rows", "columns")))
    own = {name: value for name, value in tensors.items() if name != UP}
    for kind, name, others in (
        ("one less", UP, own),
        ("one more", "surplus", {**tensors, "model.surplus.weight": tensors[UP]}),
        ("as many numbers in another shape", UP, {**own, UP: tensors[UP].reshape(1, -1)}),
    ):
        ask = partial(trial.files.export, base, base.with_name("other.apr"), "float32", tensors=others)
        yield trial.refuses(
            f"a model in memory of {kind}", ask, f"{re.escape(str(base.with_name('other.apr')))}: .*{re.escape(name)}", "ValueError"
        )
        yield from same(f"files of a refused model of {kind}", [], [each.name for each in base.parent.glob("*other*")])


def _same_layout(content: bytes, header: Mapping[str, Any], stored: Sequence[Stored]) -> list[Comparison]:
    """The file against one made from its own parts, with right checksums, flags and padding."""
    said = content[header["metadata"] :][: header["metadata_bytes"]]
    order = sorted(range(len(stored)), key=lambda place: stored[place].offset or 0)
    made = Image(said, [replace(each, offset=None, size=None) for each in stored], order=order).pack()
    return [
        *same("version", [2, 0], [header["major"], header["minor"]]),
        *same("row-major", ROW_MAJOR, header["flags"] & (ROW_MAJOR | 0x800)),
        *same("checksum at the end", zlib.crc32(content[:-4]), int.from_bytes(content[-4:], "little")),
        *same("length", len(made), len(content)),
        compare_exactly("bytes", np.frombuffer(made[: len(content)], np.uint8), np.frombuffer(content[: len(made)], np.uint8)),
    ]


def pretraining_starts(trial: Trial) -> Iterator[Comparison]:
    """The decoder of a run that starts from a file, against the weights; another family, a missing and a foreign tensor are refused."""
    model, other = drawn(trial, family="qwen2", layers=2, tied=True), drawn(trial, family="llama", layers=2)
    stored = [plain(name, value, "F32") for name, value in model.decoder.items()]
    said = metadata(model.scalars)
    lora = plain("lora.0.q_proj.lora_a", np.ones((2, 4)), "F32")
    with new_folder() as folder:
        base, theirs, path = model.write_checkpoint(folder / "base"), other.write_checkpoint(folder / "theirs"), folder / "model.apr"
        path.write_bytes(image(said, stored).pack())
        for architecture in (base, path):
            yield from same_bits(model.decoder, trial.pretrainer.initial(architecture, path).parameters())
        start = trial.pretrainer.initial
        yield trial.refuses("another family", partial(start, theirs, path), r"model\.apr.*family", "ValueError")
        for name, tensors, message in (("missing", stored[:-1], stored[-1].name), ("foreign", [*stored, lora], lora.name)):
            path.write_bytes(image(said, tensors).pack())
            yield trial.refuses(name, partial(start, base, path), rf"model\.apr.*{message}", "ValueError")


def tokenizer_beside(trial: Trial) -> Iterator[Comparison]:
    """MODEL.tokenizer.json is read, and without it nothing, whatever other tokenizers lie in the folder; MODEL.apr is a link to a file of
    another name, as in Hugging Face's cache. So is MODEL.tokenizer_config.json, whose padding an empty text is. With both, a classifier is
    made of the file."""
    with new_folder() as folder:
        path = folder / "model.v2.apr"
        (folder / "blob").write_bytes(b"")
        path.symlink_to("blob")
        shutil.copyfile(CHECKPOINT / TOKENIZER, folder / TOKENIZER)
        shutil.copyfile(CHECKPOINT / TOKENIZER, folder / "other.tokenizer.json")
        missing = trial.refuses("without", partial(trial.files.load_tokenizer, path), r"model\.v2\.tokenizer\.json", "FileNotFoundError")
        shutil.copyfile(CHECKPOINT / TOKENIZER, folder / "model.v2.tokenizer.json")
        wanted, got = trial.files.load_tokenizer(CHECKPOINT), trial.files.load_tokenizer(path)
        for name, padding in (("tokenizer_config.json", "<new>"), ("model.v2.tokenizer_config.json", "<eos>")):
            (folder / name).write_text(json.dumps({"pad_token": padding}))
        (folder / "corpus.jsonl").write_text('{"input": "", "label": 0}')
        empty = trial.corpora.read(CorpusFile(folder / "corpus.jsonl", 1), Tokenizing(path, 16))
        yield missing
        yield from same("tokens", wanted, got)
        yield from same("tokens of an empty text", ([[1]], 1), (empty.rows, empty.fill))
        yield from _opened_as_a_file(trial, folder / "whole.apr")


def _opened_as_a_file(trial: Trial, path: Path) -> list[Comparison]:
    """A classifier on a file is the one on its folder, and a folder is no file."""
    trial.files.export(CHECKPOINT, path)
    settings, texts = {"num_classes": 3, "lora_rank": 2, "quantize_nf4": False, "max_seq_len": 16, "seed": 1 + trial.seed}, ["ls -l", "rm"]
    wanted, got = trial.classifiers.fresh(CHECKPOINT, settings, texts), trial.classifiers.from_apr(path, settings, texts)
    folder = partial(trial.classifiers.from_apr, CHECKPOINT, settings, texts)
    return [*same("classifier on a file", wanted, got), trial.refuses("a folder for a file", folder, r"ends with \.apr", "ValueError")]
