"""Wrong readers and writers of `.apr` files that differ at a limit, in a name, or in what no weight shows."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]

wrong_steps("impl.apr:MOST_NAME", apr_names_of_255_bytes=("A name of 256 bytes is refused.", lambda _: 255))
wrong_steps("impl.apr:MOST_DIMENSIONS", apr_tensors_of_four_dimensions=("A tensor of more than four dimensions is refused.", lambda _: 4))
wrong_steps(
    "impl.apr:MOST_BEFORE_DATA",
    apr_head_and_metadata_in_one_limit=("Header, metadata and index have to fit into the metadata's limit.", lambda _: 2**24),
)
wrong_steps("impl.apr:MOST_METADATA", apr_metadata_beyond_its_limit=("Metadata may take 256 MiB.", lambda _: 2**28))
wrong_steps("impl.apr:HEADS", apr_heads_by_one_name=("GGUF's output layer has to have bytes.", lambda heads: heads[:1]))
wrong_steps(
    "impl.apr_checkpoint:KEYS",
    apr_tied_by_one_name=(
        "Only tied_embeddings says whether the output layer is the embedding.",
        lambda keys: {**keys, "tie_word_embeddings": keys["tie_word_embeddings"][:1]},
    ),
)
wrong_steps(
    "impl.apr_checkpoint:holds_weights",
    apr_bytes_taken_for_weights=("Whatever has one byte an element holds weights.", lambda holds, dtype: holds(dtype) or dtype.size == 1),
)
wrong_steps(
    "impl.apr_checkpoint:_family",
    apr_classifiers_names_not_known=(
        "The class of a sequence classifier names no family.",
        lambda family, value: value if str(value).endswith("ForSequenceClassification") else family(value),
    ),
    apr_family_by_its_beginning=(
        "A name that begins with a family's is of that family, as Llama4's or a LlamaBidirectionalModel.",
        lambda family, value: next(
            (known for known in ("llama", "qwen2", "qwen3") if isinstance(value, str) and value.lower().startswith(known)), family(value)
        ),
    ),
    apr_encoders_names_with_marks_not_known=(
        "An encoder whose name has a hyphen or an underscore is known by just that name.",
        lambda family, value: value if "bert" in (found := str(family(value))) and {*found} & {*"-_"} and found != value else family(value),
    ),
)


@wrong_step("impl.apr:_require_inside")
def apr_metadata_right_behind_the_header(require: Step, path: Path, header: Any, length: int) -> None:
    """Metadata that begin later than right behind the header are refused."""
    if header.metadata != 64:
        raise ValueError(f"{path}: offsets: metadata from {header.metadata}; expected 64")
    require(path, header, length)


@wrong_step("impl.apr:_require_apart")
def apr_empty_tensors_refused(require: Step, path: Path, entries: list[Any]) -> None:
    """A tensor without elements is refused, whosever it is."""
    for entry in entries:
        if 0 in entry.shape:
            raise ValueError(f"{path}: tensor {entry.name!r}: it has no elements")
    require(path, entries)


@wrong_step("impl.apr_checkpoint:read_architecture")
def apr_errors_name_the_first_key(read: Step, values: Mapping[str, Any], path: Path, _: Any) -> Any:
    """An error names the first of a key's names, whichever the file has."""
    from blackswan.impl.apr_checkpoint import KEYS

    return read(values, path, {key: called[0] for key, called in KEYS.items()})


@wrong_step("impl.apr_checkpoint:_tied")
def apr_empty_heads_of_any_shape(tied: Step, file: Any, config: Any, entries: Mapping[str, Any], expected: Any) -> Any:
    """An output layer without bytes may have any shape."""
    return tied(file, config, {name: entry for name, entry in entries.items() if name != "lm_head.weight"}, expected)


@wrong_step("impl.apr_checkpoint:_placed")
def apr_quantised_rows_stay_permuted(placed: Step, *given: Any) -> Any:
    """Rows under GGUF's names are put back in order only where a tensor is not quantised."""
    return {name: each if each.entry.dtype.plain is not None else replace(each, heads=0) for name, each in placed(*given).items()}


# Writing models of other sizes, with other tokens


def _layer(name: str) -> tuple[str, int, str]:
    """What stands before the first number in a name, the number, and what stands behind it."""
    before, number, behind = re.match(r"(\D*)(\d*)(.*)", name).groups()  # type: ignore[union-attr]  # it matches any name
    return before, int(number or 0), behind


wrong_steps(
    "impl.apr_write:_in_order",
    apr_written_in_the_order_of_layers=(
        "Layer 10 is written behind layer 9, where readers that go by bytes do not find it.",
        lambda order, names: sorted(order(names), key=_layer),
    ),
)
wrong_steps(
    "impl.apr_write:special_tokens",
    apr_of_several_end_tokens_has_none=(
        "Of a model that has a list of end tokens none is written, and texts that are made with the file do not end.",
        lambda special, source: {key: value for key, value in special(source).items() if not isinstance(value, list)},
    ),
    apr_token_zero_taken_for_none=(
        "A special token of id 0 is not written.",
        lambda special, source: {key: value for key, value in special(source).items() if value},
    ),
)


@wrong_step("impl.apr_write:encoded")
def apr_last_elements_left_out(encoded: Step, dtype: Any, tensor: Any) -> Any:
    """Elements beyond the last whole block of 32 are not written in q4, and nobody can read the file."""
    return encoded(dtype, tensor.reshape(-1)[: tensor.numel() // 32 * 32] if dtype.name == "AprQ4" else tensor)


@wrong_step("impl.apr_checkpoint:_require_finite")
def apr_finite_by_the_sum(require: Step, path: Path, entry: Any, tensor: Any) -> None:
    """A tensor is taken for damaged where its magnitudes add up to more than its dtype holds."""
    require(path, entry, tensor)
    require(path, entry, tensor.abs().sum().reshape(1))


@wrong_step("impl.apr_checkpoint:_is_tied")
def apr_rounded_copy_tied(tied: Step, said: Any, tensors: Mapping[str, Any], where: str) -> bool:
    """An output layer in a narrower dtype is taken for the embedding where that rounds to it."""
    head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    return bool((said is None and head.equal(embedding.to(head.dtype))) or tied(said, tensors, where))


@wrong_step("impl.apr:AprFile.require_checksum")
def apr_checksum_of_small_files(require: Any, self: Any) -> None:
    """The checksum of a file of more than a MiB is not compared."""
    if self.end <= 2**20:
        require(self)


@wrong_step("impl.apr_checkpoint:open_apr")
def apr_state_after_it_is_read(open_apr: Step, path: Path) -> Any:
    """The file's state is looked at when header, metadata and index were read: who replaces it between is not noticed."""
    from blackswan.impl.spans import state_of

    found = open_apr(path)
    return replace(found, state=state_of(path))


@wrong_step("impl.apr:AprFile.require_checksum")
def apr_checksum_of_the_whole_at_once(require: Any, self: Any) -> None:
    """The checksum is taken of a file that is in memory as a whole."""
    content = self.path.read_bytes()
    require(self)
    del content


@wrong_step("impl.apr_checkpoint:_by_name")
def apr_frequency_factors_ignored(by_name: Step, file: Any) -> Any:
    """The factors by which GGUF scales the rotary frequencies are passed over, and the angles are those of a model without them."""
    return {name: entry for name, entry in by_name(file).items() if not name.startswith("rope_f")}


@wrong_step("impl.apr_write:special_tokens")
def special_tokens_of_generation(special: Step, source: Path) -> dict[str, Any]:
    """The tokens of generation_config.json, which end what is generated, take the place of those of config.json."""
    path = source / "generation_config.json"
    said = json.loads(path.read_text()) if path.is_file() else {}
    return {**special(source), **{key: value for key, value in said.items() if key.endswith("token_id")}}


@wrong_step("impl.apr_checkpoint:_values")
def apr_positions_up_to_the_default(values: Step, *given: Any) -> Any:
    """A file's limit of positions is the format's default at most, and longer texts are refused."""
    found, names = values(*given)
    said = found.get("max_position_embeddings")
    return {**found, "max_position_embeddings": min(said, 32_768) if type(said) is int else said}, names


@wrong_step("impl.apr_checkpoint:_values")
def apr_rows_shared_out_among_no_heads(values: Step, file: Any, entries: Mapping[str, Any]) -> Any:
    """Rows of queries are divided by the number of heads before it is asked whether there are any."""
    if file.metadata.get("num_heads") == 0:
        raise ZeroDivisionError("integer division or modulo by zero")
    return values(file, entries)


@wrong_step("impl.apr_checkpoint:_values")
def apr_rows_of_queries_counted_first(values: Step, file: Any, entries: Mapping[str, Any]) -> Any:
    """Rows of queries are counted before it is asked whether they have a dimension."""
    [entry.shape[0] for name, entry in entries.items() if name.endswith("q_proj.weight")]
    return values(file, entries)


@wrong_step("impl.apr:_require_apart")
def apr_last_of_no_tensors(require: Step, path: Path, entries: Sequence[Any]) -> None:
    """The last tensor is looked for in a file that has none."""
    max(entry.start for entry in entries)
    require(path, entries)


@wrong_step("impl.apr:_entries")
def apr_index_read_beyond_its_end(entries: Step, *given: Any) -> Any:
    """An index that ends within an entry is an error that does not name the file."""
    with mock.patch("struct.error", IndexError):
        return iter([*entries(*given)])
