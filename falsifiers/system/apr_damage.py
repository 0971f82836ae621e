"""Damaged, hostile and unsupported `.apr` files: each is refused with its name and the field, and takes no memory."""

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from blackswan.falsifiers.numeric.apr_format import CODES, FIELDS, HEADER, NO_WEIGHTS, Image, Stored, plain
from blackswan.falsifiers.numeric.comparison import Comparison, value_at_most
from blackswan.falsifiers.numeric.generators import Generator
from blackswan.falsifiers.system.adapter_files import CONFIG, Model, generated
from blackswan.falsifiers.system.apr_files import EMBEDDING, HEAD, LONG, image, metadata, same_bits
from blackswan.falsifiers.system.apr_spellings import NAMES
from blackswan.falsifiers.system.damage import changed_meanwhile
from blackswan.falsifiers.system.footprint import most_held
from blackswan.falsifiers.system.trial import Trial
from blackswan.reference.table import Array

NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
QUERIES = "model.layers.0.self_attn.q_proj.weight"
MEMORY = 2**29
"""Bytes of address space that a refusal may take: far below what the files promise, and above the libraries' own reserves."""
CUTS, FLIPS = 60, 120
COMPUTED_WITH = (
    *("rope_freqs.weight", "rope_factors_long.weight", "blk.0.attn_sinks.weight"),
    *("blk.0.weight", "blk.0.ffn_gate.0.weight", "blk.x.ffn_gate.weight"),
)
"""GGUF's names of what other programs compute with and this decoder has no place for; the first one scales Llama 3.1's frequencies."""
SIZES = {key: NAMES.get(key, (key,)) for key in ("vocab_size", "intermediate_size", "head_dim", *[*NAMES][:5])}
"""What a file may call each number of its architecture that is one at least."""
Damage = Callable[[Image], Image]


def _header(**fields: Any) -> Damage:
    return lambda file: replace(file, header=fields)


def _flags(bits: int) -> Damage:
    return _header(flags=0x400 | bits)


def _said(**changes: Any) -> Damage:
    """Other metadata; a key that is to be None is left out by the reader."""
    return lambda file: replace(file, metadata={**_object(file), **changes})


def _text(text: bytes) -> Damage:
    return lambda file: replace(file, metadata=text)


def _object(file: Image) -> Mapping[str, Any]:
    assert isinstance(file.metadata, Mapping)
    return file.metadata


def _tensor(name: str, change: Callable[[Stored], Stored]) -> Damage:
    return lambda file: replace(file, tensors=[change(each) if each.name == name else each for each in file.tensors])


def _changed(name: str, **changes: Any) -> Damage:
    return _tensor(name, lambda each: replace(each, **changes))


def _value(number: float) -> Damage:
    """A number that is not finite in a weight."""

    def change(tensor: Stored) -> Stored:
        values = np.frombuffer(tensor.content, np.float32).copy()
        values[-1] = number
        return replace(tensor, content=values.tobytes())

    return _tensor(UP, change)


def _order(change: Callable[[list[Stored]], list[Stored]]) -> Damage:
    return lambda file: replace(file, tensors=change(list(file.tensors)))


def _of_the_body(tensor: Stored) -> Stored:
    return replace(tensor, name=tensor.name.removeprefix("model."))


def _again(file: Image) -> Image:
    """The embedding under GGUF's name beside Hugging Face's."""
    twin = plain("token_embd.weight", np.ones((32, 16)), "F32")
    return image(_object(file), [*file.tensors, twin])


def _beside(name: str) -> Damage:
    """A tensor beside those of the architecture."""
    return lambda file: image(_object(file), [*file.tensors, plain(name, np.full(4, 8.0), "F32")])


def _own(dtype: str, name: str = "__training__.z", shape: tuple[int, ...] = (1,)) -> Damage:
    """A tensor of a training run's own beside the others."""
    code, size = NO_WEIGHTS[dtype]
    own = Stored(name, code, shape, b"\1" * size * math.prod(shape))
    return lambda file: image(_object(file), [own, *file.tensors])


def _long(size: int) -> Damage:
    """Metadata of so many bytes."""

    def change(file: Image) -> Image:
        text = json.dumps({**_object(file), "vocabulary": ""}).encode()
        return replace(file, metadata=text[:-2] + b"x" * (size - len(text)) + text[-2:])

    return change


def _data_early(by: int) -> Damage:
    """The data begin so many bytes too early, for most numbers before the index's last entry ends."""

    def change(file: Image) -> Image:
        fields = dict(zip(FIELDS, HEADER.unpack(file.pack()[: HEADER.size]), strict=True))
        return replace(file, header={"data": fields["data"] - by})

    return change


def _not_tied(said: str, without: Damage) -> Damage:
    """The output layer is said not to be the embedding by that key, and has no content."""
    return lambda file: _said(**{said: False})(without(file))


def _half(number: float) -> bytes:
    return np.float16(number).tobytes()


REFUSED: dict[str, tuple[Damage, str]] = {
    "another magic": (_header(magic=b"GGUF"), "magic"),
    "version 1": (_header(magic=b"APRN"), "magic.*version 1"),
    "the draft": (_header(magic=b"APR2"), "magic.*draft"),
    "version 3": (_header(major=3), "version.*3"),
    "version 2.1": (_header(minor=1), "version.*2.1"),
    "header checksum": (_header(checksum=1), "checksum"),
    "reserved bytes": (_header(reserved=b"\0" * 19 + b"\1"), "reserved"),
    "LZ4": (_flags(0x1), "flags.*compressed"),
    "ZSTD": (_flags(0x2), "flags.*compressed"),
    "encrypted": (_flags(0x4), "flags.*encrypted"),
    "signed": (_flags(0x8), "flags.*signed"),
    "sharded": (_flags(0x10), "flags.*sharded"),
    "column-major": (_header(flags=0x800), "flags.*column-major"),
    "unknown flag": (_flags(0x4000), "flags.*unknown"),
    "compressed and encrypted": (_flags(0x5), "flags.*(compressed|encrypted)"),
    "two unknown flags": (_flags(0xC000), "flags.*unknown"),
    "fewer tensors than the index": (_header(tensors=3), "index"),
    "more tensors than the index": (_header(tensors=2000), "index"),
    "no tensors": (_order(lambda _: []), "(num_layers|tensor)"),
    "one tensor without bytes": (_order(lambda tensors: [replace(tensors[0], name=HEAD, content=b"")]), "(num_layers|tensor)"),
    **{f"data {by} bytes early": (_data_early(by), "(index|length)") for by in range(8, 128, 8)},
    "index before the metadata": (_header(index=64), "offsets"),
    "metadata in the header": (_header(metadata=40), "offsets"),
    "metadata of more than 16 MiB": (_header(metadata_bytes=2**24 + 1), "metadata length"),
    "metadata that is no JSON": (_text(b"{"), "metadata"),
    "metadata that is no object": (_text(b"[]"), "metadata"),
    "metadata with NaN": (_text(b'{"hidden_size": NaN}'), "metadata"),
    "metadata in UTF-16": (_text('{"a": 1}'.encode("utf-16")), "metadata"),
    "deep metadata": (_text(b"[" * 100_000), "metadata"),
    "sharding": (_said(sharding={"shards": 2}), "sharding"),
    "experts": (_said(num_experts=8), "num_experts"),
    "encoder": (_said(architecture="BertModel"), "architecture.*encoder"),
    **{
        f"encoder by the name {name}": (_said(architecture=name), "architecture.*encoder")
        for name in ("roberta", "xlm-roberta", "XLMRobertaForMaskedLM", "DebertaV2Model", "NomicBertModel", "nomic_bert")
    },
    "another family": (_said(architecture="MistralForCausalLM"), "architecture.*expected one of"),
    **{
        f"another family, {name}": (_said(architecture=name), "architecture.*expected one of")
        for name in ("Llama4ForCausalLM", "LlamaBidirectionalModel", "Qwen2MoeForCausalLM", "qwen3_next")
    },
    **{
        f"{name} of {value!r}": (_said(**{"architecture": None, name: value}), f"{name}.*expected one of")
        for name in ("architecture", "hf_architecture", "model_type")
        for value in (["LlamaForCausalLM"], {"llama": 1}, 5, True)
    },
    "no family": (_said(architecture=None), "architecture"),
    "two families": (_said(hf_architecture="LlamaForCausalLM"), "hf_architecture.*which is meant"),
    "two sizes": (_said(n_embd=99), "n_embd.*which is meant"),
    "no heads": (_said(num_heads=None), "num_heads"),
    "size as text": (_said(hidden_size="16"), "hidden_size"),
    **{f"{name} as text": (_said(**{key: None, name: "x"}), f"{name} is 'x'") for key, names in NAMES.items() for name in names[1:]},
    **{
        f"{name} of {number}": (_said(**{key: None, name: number}), f"{name} is {number}")
        for number in (0, -1)
        for key, names in SIZES.items()
        for name in names
    },
    "another size": (_said(intermediate_size=25), "shape"),
    "more layers": (_said(num_layers=2), "model.layers.1"),
    "scaled rotary embedding": (_said(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "rope_scaling"),
    "tied in words": (_said(tied_embeddings="yes"), "tied_embeddings"),
    **{f"{name} and another output layer": (_said(**{name: True}), f"{name} is true") for name in NAMES["tied_embeddings"]},
    **{
        f"{name} false and an output layer {what}": (_not_tied(name, without), f"{name} is False.*{HEAD}")
        for name in NAMES["tied_embeddings"]
        for what, without in (
            ("that is absent", _order(lambda tensors: [each for each in tensors if each.name != HEAD])),
            ("without bytes", _changed(HEAD, content=b"")),
        )
    },
    "unsorted": (_order(lambda tensors: [*tensors[1:], tensors[0]]), "index.*order"),
    "twice": (_order(lambda tensors: [tensors[0], *tensors]), "index.*twice"),
    "under two names": (_again, "token_embd"),
    "name that is not UTF-8": (_order(lambda tensors: [*tensors, replace(tensors[-1], name="z\udcff")]), "index.*UTF-8"),
    "long name": (_order(lambda tensors: [*tensors, replace(tensors[-1], name="z" * 257)]), "name of 257"),
    "nine dimensions": (_changed(NORM, shape=(1,) * 8 + (16,)), "9 dimensions"),
    "missing tensor": (_order(lambda tensors: [each for each in tensors if each.name != NORM]), NORM),
    "names of a body alone": (_order(lambda tensors: sorted(map(_of_the_body, tensors), key=lambda each: each.name)), "embed_tokens"),
    "foreign tensor": (_order(lambda tensors: [*tensors, replace(tensors[-1], name="z")]), "unexpected tensor 'z'"),
    **{f"{name} of GGUF": (_beside(name), f"unexpected tensor '{name}'") for name in COMPUTED_WITH},
    "dtype 2": (_changed(NORM, code=2), f"{NORM}.*code 2"),
    "unknown dtype": (_changed(NORM, code=99), f"{NORM}.*code 99"),
    **{
        f"{dtype} for a weight": (_changed(NORM, code=code, content=bytes(16 * size)), f"{NORM}.*{dtype}.*cannot be a weight")
        for dtype, (code, size) in NO_WEIGHTS.items()
    },
    "too few bytes": (_changed(NORM, size=60), f"{NORM}.*60"),
    "no bytes": (_changed(NORM, content=b""), NORM),
    **{f"no dimension of {name}": (_changed(name, shape=(), content=bytes(4)), name) for name in (NORM, QUERIES)},
    "an output layer of another shape without bytes": (_changed(HEAD, content=b"", shape=(2, 16)), HEAD),
    "column by column": (_tensor(UP, lambda each: replace(each, shape=each.shape[::-1])), UP),
    "overlap": (_changed(UP, offset=0), "overlaps"),
    "inside another": (_changed(NORM, offset=64), "overlaps"),
    "out of range": (_changed(NORM, offset=2**40), NORM),
    "past 64 bits": (_changed(NORM, offset=2**64 - 16), NORM),
    "NaN": (_value(np.nan), rf"{UP}.*nan at \[23, 15\]"),
    "infinity": (_value(-np.inf), rf"{UP}.*inf at \[23, 15\]"),
    **{
        f"{dtype} with a {part} that is {number}": (_changed(name, code=CODES[dtype], content=content), f"{name}.*finite")
        for number in (np.inf, -np.inf, np.nan)
        for dtype, part, name, content in (
            ("Q6_K", "scale", NORM, b"\x01" * 208 + _half(number)),
            ("Q4_K", "scale", NORM, _half(number) + _half(1.0) + b"\x11" * 140),
            ("Q4_K", "least value", NORM, _half(1.0) + _half(number) + b"\x11" * 140),
            ("AprQ4", "scale", UP, (_half(1.0) + b"\x11" * 16) * 11 + _half(number) + b"\x11" * 16),
            ("AprQ8", "scale", UP, np.float32(number).tobytes() + b"\x01" * 384),
        )
    },
    "Q4_K of either layout": (_changed(UP, code=CODES["Q4_K"], shape=(2, 200), content=bytes(288)), f"{UP}.*padded"),
    "Q6_K of neither layout": (_changed(UP, code=CODES["Q6_K"], content=bytes(210 * 5)), f"{UP}.*padded"),
}
"""What is wrong with a file → how it comes about, and what the refusal names beside the file."""
TAKEN: dict[str, Damage] = {
    "metadata of 16 MiB": _long(2**24),
    "a name of 256 bytes": _own("I64", "__training__.".ljust(256, "z")),
    "a name beyond ASCII": _own("I64", "__training__.\u00e9\u4e00"),
    **{f"the shape {shape}": _own("I64", shape=shape) for shape in ((1,) * 8, (), (0,), (3, 0))},
    **{f"{dtype} beside the weights": _own(dtype) for dtype in NO_WEIGHTS},
    "room before the parts": lambda file: replace(file, room=128),
}
"""What is as the format allows, at its limits too, and changes no weight."""
PROMISES: dict[str, Damage] = {
    "tensors": _header(tensors=2**32 - 1),
    "metadata of 4 GiB": _header(metadata_bytes=2**32 - 1),
    "metadata far away": _header(metadata=2**60),
    "an index of 2^60 bytes": _header(data=2**60),
    "an index far away": _header(index=2**60, data=2**60),
    "a shape of 2^60": _changed(NORM, shape=(2**60,)),
    "a tensor of 2^60 bytes": _changed(NORM, shape=(2**58,), size=2**60),
    "dimensions whose product overflows": _changed(NORM, shape=(2**32, 2**32), size=0),
    "a quantised tensor of 2^60 bytes": _changed(NORM, code=CODES["Q4_K"], shape=(2**60,), size=2**60 // 256 * 144),
    "layers": _said(num_layers=2**40),
    "a vocabulary": _said(vocab_size=2**40),
    "heads": _said(num_heads=2**39, num_kv_heads=2**39),
    "a number of many digits": _text(b'{"hidden_size": 1' + b"0" * 100_000 + b"}"),
}
"""What a header, an index or the metadata promise that the file does not have."""
PROMISED = ("num_hidden_layers", "vocab_size", "intermediate_size")
"""Keys of a config.json by which a folder would have more than it has."""


def _model(trial: Trial) -> Model:
    """A small Qwen2, in the plainest spelling."""
    sizes = {"layers": 1, "hidden": 16, "intermediate": 24, "heads": 2, "kv_heads": 1, "head_dim": 8, "factor": 1.0}
    return replace(generated(trial.rng("model"), trial.seed, "float32", family="qwen2", nf4=False, tied=False, **sizes), config={})


def _small(trial: Trial) -> tuple[Image, dict[str, Array]]:
    """Its file as it should be, and its tensors."""
    model = _model(trial)
    return image(metadata(model.scalars), [plain(name, value, "F32") for name, value in model.decoder.items()]), model.decoder


def refuses_file(trial: Trial) -> Iterator[Comparison]:
    """Each damage in turn: a ValueError with the file's name and the field; what no damage was done to is read, at the limits too."""
    whole, tensors = _small(trial)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.apr"
        path.write_bytes(whole.pack())
        yield from same_bits(tensors, trial.files.read_checkpoint(path))
        for name, allowed in TAKEN.items():
            path.write_bytes(allowed(whole).pack())
            yield from (replace(each, tensor=f"{name}: {each.tensor}") for each in same_bits(tensors, trial.files.read_checkpoint(path)))
        for name, (damage, message) in REFUSED.items():
            path.write_bytes(damage(whole).pack())
            yield trial.refuses(name, partial(trial.files.read_checkpoint, path), rf"model\.apr: .*{message}", "ValueError")
        absent = partial(trial.files.read_checkpoint, path.with_name("absent.apr"))
        path.write_bytes(whole.pack())
        yield from changed_meanwhile(trial, path, path)
        yield trial.refuses("no such file", absent, "absent.apr: no such file", "FileNotFoundError")
        yield from _place_of_a_number(trial, path)


def _place_of_a_number(trial: Trial, path: Path) -> Iterator[Comparison]:
    """A number of a large tensor that is not finite is named with its place in that."""
    rng = trial.rng("place")
    large = replace(generated(rng, trial.seed, "float32", nf4=False, factor=1.0, layers=1, **LONG), config={})
    place = [int(rng.integers(size // 2, size)) for size in large.decoder[EMBEDDING].shape]
    large.decoder[EMBEDDING][tuple(place)] = np.nan
    tensors = [plain(name, value, "F32") for name, value in large.decoder.items()]
    path.write_bytes(image(metadata(large.scalars), tensors, footer=False).pack())
    ask = partial(trial.files.read_checkpoint, path)
    yield trial.refuses(f"NaN at {place}", ask, rf"model\.apr: .*{re.escape(EMBEDDING)}.*nan at {re.escape(str(place))}", "ValueError")


def refuses_damage(trial: Trial) -> Iterator[Comparison]:
    """One byte of a file with a checksum, small or large, is another; a file is cut anywhere. One that lost its checksum alone is whole.
    A large one is never in memory as a whole, as a file may be larger than that."""
    rng, (whole, tensors) = trial.rng("damage"), _small(trial)
    content, bare = whole.pack(), replace(whole, footer=False).pack()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.apr"
        for sound in (bare, content):  # and its checksum is not known from then on
            path.write_bytes(sound)
            yield from same_bits(tensors, trial.files.read_checkpoint(path))
        ask, named = partial(trial.files.read_checkpoint, path), r"model\.apr: "
        for name, damaged in _damages(rng, content, len(bare)):
            path.write_bytes(damaged)
            for time in ("once", "again"):
                yield trial.refuses(f"{name}, {time}", ask, named, "ValueError")
        large = replace(generated(rng, trial.seed, "float32", nf4=False, factor=1.0, layers=1, **LONG | {"vocab": 64_000}), config={})
        content = image(metadata(large.scalars), [plain(name, value, "F32") for name, value in large.decoder.items()]).pack()
        for megabyte in range(2):
            changed = bytearray(content)
            changed[megabyte * 2**20 + 2**16 + 4 * int(rng.integers(2**16))] ^= 1
            path.write_bytes(changed)
            name = f"a byte behind {megabyte} MiB of {len(content):,} bytes"
            refuses = partial(trial.refuses, name, ask, r"model\.apr: footer", "ValueError")
            yield refuses()
            yield value_at_most("share of a large file in memory while it is looked at", most_held(refuses) / len(content), 0.3)


def _damages(rng: Generator, content: bytes, bare: int) -> list[tuple[str, bytes]]:
    edges = [0, 1, 4, 63, 64, 65, bare - 1, bare + 1, bare + 3]
    lengths = [*edges, *map(int, rng.integers(0, bare, CUTS))]
    places = [*range(0, 64, 3), bare - 1, bare, *map(int, rng.integers(0, len(content), FLIPS))]
    flipped = [bytearray(content) for _ in places]
    for copy, place in zip(flipped, places, strict=True):
        copy[place] ^= int(rng.integers(1, 256))
    cut = [(f"cut after {length} of {len(content)}", content[:length]) for length in lengths]
    longer = [("a byte more", content + b"\0"), ("64 bytes more", content + bytes(64))]
    zeros = [(f"zeros after {length} of {len(content)}", content[:length] + bytes(len(content) - length)) for length in lengths]
    zeros = [(name, damaged) for name, damaged in zeros if damaged != content]  # as a download leaves it that was laid out before
    return [*cut, *zeros, *longer, *((f"byte {place}", bytes(copy)) for place, copy in zip(places, flipped, strict=True))]


def refuses_promises(trial: Trial) -> Iterator[Comparison]:
    """Sizes that the file, or a folder, does not have: a ValueError, in a process that may take only so much memory."""
    whole, _ = _small(trial)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.apr"
        path.write_bytes(whole.pack())
        trial.files.read_checkpoint(path, memory=MEMORY)
        for name, damage in PROMISES.items():
            path.write_bytes(damage(whole).pack())
            ask = partial(trial.files.read_checkpoint, path, memory=MEMORY)
            yield trial.refuses(name, ask, r"model\.apr", "ValueError")
        base = _model(trial).write_checkpoint(Path(folder) / "base")
        whole_config = json.loads((base / CONFIG).read_text())
        for key in PROMISED:
            (base / CONFIG).write_text(json.dumps(whole_config | {key: 2**40}))
            ask = partial(trial.files.read_checkpoint, base, memory=MEMORY)
            yield trial.refuses(f"{key} of a folder", ask, "base", "ValueError")
