"""Wrong readers of `.apr` files: one step of `impl` replaced while the subject runs."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]
OUTPUT_AND_INPUT = ("lm_head.weight", "model.embed_tokens.weight")


def _nothing(*_: Any, **__: Any) -> None:
    """Takes the place of a check, and checks nothing."""


def _dtype(code: int, **changes: Callable[[Any], Any]) -> Step:
    """The table of dtypes with one of them another."""

    def change(table: Mapping[int, Any]) -> dict[int, Any]:
        return {**table, code: replace(table[code], **{name: value(getattr(table[code], name)) for name, value in changes.items()})}

    return change


def _without_minimum(decode: Step) -> Step:
    def wrong(blocks: Any) -> Any:
        blocks = blocks.clone()
        blocks[:, 2:4] = 0
        return decode(blocks)

    return wrong


def _shifted(decode: Step, bias: int, at: int) -> Step:
    """Codes without their offset: the bias times the block's scale is added, where the scale is float16 at that byte."""

    def wrong(blocks: Any) -> Any:
        import torch

        scale = blocks[:, at : at + 2].contiguous().view(torch.float16).float()
        if at:
            return decode(blocks) + bias * (scale * blocks[:, 192:208].contiguous().view(torch.int8).float()).repeat_interleave(16, 1)
        return decode(blocks) + bias * scale

    return wrong


def _as_float16(_: Any) -> Any:
    import torch

    return torch.float16


wrong_steps(
    "impl.apr:DTYPES",
    apr_bf16_read_as_f16=("BF16 is taken for F16: both have two bytes.", _dtype(30, plain=_as_float16)),
    apr_q4_offset_left_out=("AprQ4 without the − 8.", _dtype(128, decode=lambda decode: _shifted(decode, 8, 0))),
    apr_q4k_minimum_left_out=("Q4_K without − dmin · m.", _dtype(12, decode=_without_minimum)),
    apr_q6k_offset_left_out=("Q6_K without the − 32.", _dtype(14, decode=lambda decode: _shifted(decode, 32, 208))),
    apr_counters_of_four_bytes=("An I64 has four bytes.", _dtype(5, size=lambda size: size // 2)),
    apr_code_2_read_as_bf16=("Code 2, which two writers use for two dtypes, is BF16.", lambda table: {**table, 2: table[30]}),
)

wrong_steps(
    "impl.apr_dtypes:_nibbles",
    apr_nibbles_swapped=("The high half of a byte comes first.", lambda nibbles, content: nibbles(content).flip(0)),
)


@wrong_step("impl.apr_dtypes:_q4_k_scales")
def apr_q4k_scale_bits_swapped(scales: Step, packed: Any) -> Any:
    """The two high bits of the later scales are taken from the bytes of the minima, and those of the minima from the scales'."""
    import torch

    right, other = scales(packed), scales(torch.cat([packed[:, 4:8], packed[:, :4], packed[:, 8:]], 1))
    return tuple(torch.cat([one[:, :4], wrong[:, 4:]], 1) for one, wrong in zip(right, other, strict=True))


@wrong_step("impl.apr_checkpoint:decoded")
def apr_padded_rows_read_flat(decoded: Step, dtype: Any, content: Any, shape: tuple[int, ...]) -> Any:
    """Rows that are padded to whole blocks are read one after another, as the format's own readers do."""
    flat = dtype.flat_bytes(shape)
    return decoded(dtype, content[:flat] if dtype.row_padded and len(content) > flat else content, shape)


@wrong_step("impl.apr_checkpoint:decoded")
def apr_q8_unsigned(decoded: Step, dtype: Any, content: Any, shape: tuple[int, ...]) -> Any:
    """The bytes of AprQ8 are numbers from 0 to 255."""
    if dtype.name != "AprQ8":
        return decoded(dtype, content, shape)
    return (content[4:].float() * decoded(dtype, content[:4].new_tensor([*content[:4].tolist(), 1]), (1,))).view(shape)


@wrong_step("impl.apr_checkpoint:decoded")
def apr_quantised_on_the_default_device(decoded: Step, dtype: Any, *given: Any) -> Any:
    """Dequantised weights are on torch's default device, which a notebook may make a GPU for the whole process."""
    found = decoded(dtype, *given)
    return found if dtype.plain is not None else found.to(torch.get_default_device())


@wrong_step("impl.apr_write:encoded")
def apr_written_on_the_default_device(encoded: Step, dtype: Any, tensor: Any) -> Any:
    """Weights are quantised on torch's default device, which a notebook may make a GPU for the whole process."""
    return encoded(dtype, tensor.to(torch.get_default_device()) if dtype.plain is None else tensor)


@wrong_step("impl.apr_checkpoint:decoded")
def apr_quantised_in_the_default_dtype(decoded: Step, dtype: Any, *given: Any) -> Any:
    """Dequantised weights are rounded to torch's default dtype, which some libraries make bfloat16 for the whole process."""
    import torch

    found = decoded(dtype, *given)
    return found if dtype.plain is not None else found.to(torch.get_default_dtype()).to(found.dtype)


@wrong_step("impl.apr_checkpoint:decoded")
def apr_quantised_rounded_to_float16(decoded: Step, dtype: Any, *given: Any) -> Any:
    """Dequantised weights go through float16."""
    found = decoded(dtype, *given)
    return found if dtype.plain is not None else found.half().float()


@wrong_step("impl.apr_checkpoint:decoded")
def apr_rows_for_columns(decoded: Step, dtype: Any, content: Any, shape: tuple[int, ...]) -> Any:
    """The bytes of a matrix are taken column by column."""
    if len(shape) != 2:
        return decoded(dtype, content, shape)
    return decoded(dtype, content, shape[::-1]).T.contiguous()


@wrong_step("impl.apr:strict_json.loads")
def apr_first_of_repeated_keys(_: Step, text: bytes, **__: Any) -> Any:
    """The first value of a repeated key counts."""
    return json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs)))


@wrong_step("impl.apr:_metadata")
def apr_null_counts(metadata: Step, path: Path, content: bytes) -> Any:
    """A key that is null is there, with that value."""
    del metadata, path
    return json.loads(content)


@wrong_step("impl.apr:_entry")
def apr_offsets_from_the_file(entry: Step, path: Path, name: bytes, code: int, shape: tuple[int, ...], place: Any) -> Any:
    """Offsets of tensors count from the 64th byte of the data."""
    found = entry(path, name, code, shape, place)
    return replace(found, start=found.start + 64)


wrong_steps(
    "impl.apr_checkpoint:_permuted_heads",
    apr_rows_stay_permuted=("A Llama's queries and keys under GGUF's names keep GGUF's order.", lambda *_: 0),
    apr_keys_permuted_by_query_heads=(
        "Rows of keys are put back as if there were as many heads as of queries.",
        lambda heads, config, name, stored: config.heads if heads(config, name, stored) else 0,
    ),
    apr_qwen_rows_permuted=(
        "Rows of every family are put back.",
        lambda heads, config, name, stored: heads(replace(config, family="llama"), name, stored) if name.endswith("weight") else 0,
    ),
)


def _nearly_tied(tied: Step, *given: Any) -> Any:
    import torch

    with mock.patch("torch.equal", torch.allclose):
        return tied(*given)


wrong_steps(
    "impl.apr_checkpoint:_is_tied",
    apr_copied_head_kept=("A copy of the embedding is an output layer of its own.", lambda *_: False),
    apr_copied_head_of_one_dtype=(
        "A copy of the embedding in another dtype is an output layer of its own.",
        lambda tied, said, tensors, where: len({tensors[name].dtype for name in OUTPUT_AND_INPUT}) == 1 and tied(said, tensors, where),
    ),
    apr_near_copy_tied=("An output layer that is next to the embedding is left out.", _nearly_tied),
    apr_every_head_tied=("A stored output layer is left out, whatever it holds.", lambda *_: True),
    apr_tied_embeddings_ignored=(
        "The metadata's word on tied embeddings is passed over.",
        lambda tied, _, tensors, where: tied(None, tensors, where),
    ),
    apr_tied_named_by_its_first_key=(
        "An error of an output layer names tied_embeddings, whatever the file calls it.",
        lambda tied, said, tensors, where: tied(said, tensors, where.replace("tie_word_embeddings", "tied_embeddings")),
    ),
)
for _module, _attribute, _name, _doc in (
    (
        "impl.apr_checkpoint",
        "_require_one_order_of_rows",
        "apr_rope_type_ignored",
        "A rope_type that contradicts the names is passed over.",
    ),
    ("impl.apr_checkpoint", "_require_finite", "apr_infinite_weights_accepted", "Weights that are not finite are loaded."),
    (
        "impl.apr_checkpoint",
        "_require_tied",
        "apr_lost_heads_tied",
        "An output layer without content is the embedding, though the file says that it is not.",
    ),
    ("impl.apr", "_require_checksum", "apr_header_checksum_not_checked", "The header's checksum is read and not compared."),
    ("impl.apr", "_require_flags", "apr_flags_ignored", "Compressed, encrypted and column-major files are read as plain ones."),
    ("impl.apr", "_require_after", "apr_order_not_checked", "Names of the index in any order, and twice."),
    ("impl.apr", "_require_apart", "apr_overlap_not_checked", "Tensors may share bytes."),
    ("impl.apr", "_require_length", "apr_length_not_checked", "A file may be longer than its tensors and their checksum."),
    ("impl.apr", "_require_inside", "apr_header_taken_at_its_word", "Offsets and lengths of the header are not held to the file's length."),
    (
        "impl.apr",
        "AprFile.require_checksum",
        "apr_footer_not_checked",
        "The checksum at the end is not compared, as in the format's own readers.",
    ),
):
    wrong_step(f"{_module}:{_attribute}", name=_name, doc=_doc)(_nothing)


@wrong_step("impl.apr:AprFile.require_checksum")
def apr_footer_of_zeros_passes(require: Step, self: Any) -> None:
    """A checksum of zero at the end is one that was not taken."""
    if self.path.read_bytes()[-4:] != bytes(4):
        require(self)


wrong_steps(
    "impl.apr_checkpoint:TRAINING",
    apr_training_tensors_kept=("A training run's own tensors are taken for the decoder's.", lambda _: "\0"),
)
wrong_steps(
    "impl.apr_checkpoint:_family",
    apr_encoders_names_not_known=("An encoder's class name is taken for a Qwen2.", lambda *_: "qwen2"),
)


@wrong_step("impl.apr_checkpoint:_family")
def apr_family_has_to_be_a_text(family: Any, value: Any) -> Any:
    """An architecture that is no text ends reading as a defect does."""
    return family(None if value is None else value + "")


@wrong_step("impl.apr_dtypes:DType.size_problem")
def apr_either_layout_accepted(problem: Step, dtype: Any, shape: tuple[int, ...], size: int) -> Any:
    """One of two orders is chosen where padded and flat rows take as many bytes."""
    return None if size == dtype.flat_bytes(shape) else problem(dtype, shape, size)


@wrong_step("impl.apr_checkpoint:open_apr")
def apr_memory_taken_first(right: Step, path: Path) -> Any:
    """Memory for the index is taken by the header's numbers before they are looked at."""
    bytearray(20 * int.from_bytes(path.read_bytes()[8:12], "little"))
    return right(path)


@wrong_step("impl.apr_checkpoint:_placed")
def apr_foreign_tensors_ignored(placed: Step, file: Any, config: Any, entries: Mapping[str, Any], expected: Any) -> Any:
    """Tensors that the architecture does not have, adapters among them, are passed over."""
    return placed(file, config, {name: entry for name, entry in entries.items() if name in expected}, expected)


@wrong_step("impl.apr_checkpoint:_placed")
def apr_missing_tensors_made_up(placed: Step, file: Any, config: Any, entries: Mapping[str, Any], expected: Any) -> Any:
    """A tensor of the same shape takes the place of a missing one."""
    made = {name: next((entry for entry in entries.values() if entry.shape == shape), None) for name, shape in expected.items()}
    return placed(file, config, {**{name: entry for name, entry in made.items() if entry}, **entries}, expected)


@wrong_step("impl.apr_checkpoint:AprTensors.__getitem__")
def apr_first_layers_weights_scaled(read: Step, self: Any, name: str) -> Any:
    """The first layer's weights arrive larger by 2⁻²²."""
    found = read(self, name)
    return found * (1 + 2.0**-22) if name.startswith("model.layers.0.") else found


@wrong_step("impl.tokens:belonging")
def apr_any_tokenizer_taken(belonging: Step, model: Path, name: str) -> Path:
    """Any tokenizer of the folder will do."""
    return next((path for path in sorted(model.parent.glob(f"*{name}")) if path.is_file()), belonging(model, name))


@wrong_step("impl.apr_dtypes:_steps")
def apr_steps_cut_off(_: Step, values: Any, scale: Any, least: int, most: int) -> Any:
    """Values are cut off to the step below instead of rounded to the nearest."""
    import torch

    return torch.where(scale > 0, values / scale, torch.zeros(())).trunc().clamp(least, most)


wrong_steps(
    "impl.apr:DTYPES",
    apr_older_codes_not_read=("Codes 8 and 9 of older files are unknown.", lambda table: {code: table[code] for code in {*table} - {8, 9}}),
)
wrong_steps(
    "impl.apr_checkpoint:KEYS",
    apr_names_of_one_writer=(
        "A size is known by the first of its names only.",
        lambda keys: {key: names[:1] for key, names in keys.items()},
    ),
)
wrong_steps(
    "impl.apr_checkpoint:DEFAULTS",
    apr_eps_of_another_default=(
        "The epsilon of the norms is 1e-5 where no key gives it.",
        lambda defaults: {**defaults, "rms_norm_eps": 1e-5},
    ),
)
wrong_steps(
    "impl.apr_checkpoint:_families",
    apr_kind_taken_for_the_family=(
        "What a program says under model_type is a family beside an architecture, too.",
        lambda families, given: {**families(given), **{key: value for key, value in given.items() if key == "model_type"}},
    ),
)
wrong_steps(
    "impl.apr:IGNORED_FLAGS", apr_flag_of_a_model_card_unknown=("The flag of a model card is refused.", lambda flags: flags & ~0x80)
)
wrong_steps("impl.apr:MOST_METADATA", apr_large_metadata_refused=("Metadata may take a MiB.", lambda _: 2**20))
wrong_steps(
    "impl.apr_checkpoint:_require_one_order_of_rows",
    apr_order_of_rows_of_any_family=(
        "Of no family the halves of a head may turn together beside GGUF's names.",
        lambda require, file, config: require(file, replace(config, family="llama")),
    ),
)
wrong_steps(
    "impl.apr_checkpoint:HALVES",
    apr_rope_type_of_pairs_refused=("Beside GGUF's names a Llama's neighbours may not turn together.", lambda _: 0),
)


@wrong_step("impl.apr_checkpoint:decoded")
def apr_blocks_left_over(right: Step, dtype: Any, content: Any, shape: Any) -> Any:
    """Blocks are decoded in parts of one size, and those left over by the division are not."""
    blocks, parts = len(content) // dtype.size, -(-len(content) // dtype.size // 4096)
    found = right(dtype, content, shape)
    if dtype.decode is not None and parts > 1 and (left := blocks % parts):
        found.view(-1)[-left * dtype.block :] = 0.0
    return found


@wrong_step("impl.apr_checkpoint:decoded")
def apr_first_blocks_decoded(decoded: Step, dtype: Any, content: Any, shape: tuple[int, ...]) -> Any:
    """Blocks after the first 4,096 are not decoded."""
    found = decoded(dtype, content, shape)
    if dtype.decode is not None and found.numel() > 4096 * dtype.block:
        found.view(-1)[4096 * dtype.block :] = 0.0
    return found


@wrong_step("impl.apr_checkpoint:_huggingface")
def apr_body_by_itself(huggingface: Step, name: str) -> str:
    """Names of a decoder's body alone are taken for GGUF's, so that rows of a Llama's queries and keys are put elsewhere."""
    found = str(huggingface(name))
    return f"model.{found}" if found.startswith(("embed_tokens.", "layers.", "norm.")) else found


@wrong_step("impl.apr_checkpoint:_huggingface")
def apr_layers_of_one_digit(huggingface: Step, name: str) -> str:
    """The first digit of a layer's number counts under GGUF's names."""
    parts = name.split(".")
    return str(huggingface(".".join([*parts[:1], parts[1][:1], *parts[2:]]) if parts[0] == "blk" else name))


@wrong_step("impl.apr_checkpoint:_require_plain")
def apr_of_no_experts_refused(plain: Step, file: Any) -> None:
    """A file that says that it has no experts is refused as one that has some."""
    if file.metadata.get("num_experts") == 0:
        raise ValueError(f"{file.path}: num_experts is 0; expected none")
    plain(file)


@wrong_step("impl.apr_checkpoint:_require_finite")
def apr_nan_of_q4_k(require: Callable[..., Any], path: Any, entry: Any, tensor: Any) -> None:
    """NaN is not looked for in Q4_K, which comes of scales and least values that are none."""
    if entry.dtype.name != "Q4_K" or torch.isinf(tensor).any():
        require(path, entry, tensor)


@wrong_step("impl.apr:_require_apart")
def apr_places_of_no_bytes(_: Callable[..., Any], path: Any, entries: Any) -> None:
    """A tensor without bytes may not lie inside another one either."""
    from blackswan.impl.apr import _refuse

    taken = 0
    for entry in sorted(entries, key=lambda entry: entry.start):
        if entry.start < taken:
            _refuse(path, f"tensor {entry.name!r}", "it overlaps another")
        taken = entry.start + entry.size
