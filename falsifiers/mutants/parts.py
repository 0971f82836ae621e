"""Large tensors of files that are worked off in parts, of which the ends, the places or the last one are wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from blackswan.falsifiers.mutants.registry import wrong_step

Step = Callable[..., Any]
PART = 2**20
"""Numbers, or bytes."""


@wrong_step("impl.apr_checkpoint:decoded")
def apr_q8_parts_without_their_ends(decoded: Step, dtype: Any, content: Any, shape: Any) -> Any:
    """Each part of a large tensor in AprQ8 ends as many numbers too early as a scale has bytes."""
    found = decoded(dtype, content, shape)
    if dtype.name == "AprQ8" and found.numel() > PART:
        found.view(-1)[PART - dtype.prefix : PART] = 0
    return found


@wrong_step("impl.apr_checkpoint:decoded")
def apr_padding_cut_within_parts(decoded: Step, dtype: Any, content: Any, shape: Any) -> Any:
    """The padding of rows is cut off in each part of 4,096 blocks, as if no row were in two of them."""
    found = decoded(dtype, content, shape)
    blocks = -(-shape[-1] // dtype.block) if dtype.row_padded and len(content) == dtype.padded_bytes(shape) else 1
    return found.roll(1, 0) if len(content) > 4096 * dtype.size and 4096 % blocks else found


@wrong_step("impl.apr_checkpoint:_require_finite")
def apr_places_within_a_part(require: Step, path: Path, entry: Any, tensor: Any) -> None:
    """A number that is not finite is looked for in 4,096 rows at a time, and its place is that in the part."""
    for part in tensor.split(4096):
        require(path, entry, part)


@wrong_step("impl.apr_write:encoded")
def apr_parts_of_rows_end_with_a_block(encoded: Step, dtype: Any, tensor: Any) -> Any:
    """A large matrix is written in q4 in parts of whole rows, each of which ends with a block of its own."""
    if dtype.name != "AprQ4" or tensor.numel() <= PART:
        return encoded(dtype, tensor)
    return torch.cat([encoded(dtype, part) for part in tensor.split(PART // tensor.shape[-1])])


@wrong_step("impl.merge:_updated")
def merged_without_the_last_rows(updated: Step, path: str, weight: Any, adapter: Any) -> Any:
    """A large weight is merged in parts of as many rows each, and those that are left over have no update."""
    found, parts = updated(path, weight, adapter), max(1, weight.numel() // PART)
    rows = len(weight) // parts * parts
    return torch.cat([found[:rows], weight[rows:]])


@wrong_step("impl.checkpoint:load_checkpoint")
def tied_by_the_first_part(load: Step, folder: Path) -> Any:
    """An output layer is compared to the embedding that it is said to be by the first numbers alone."""
    equal = torch.equal
    with patch.object(torch, "equal", lambda one, other: equal(one.flatten()[:PART], other.flatten()[:PART])):
        return load(folder)


@wrong_step("impl.apr_checkpoint:_is_tied")
def apr_tied_by_the_first_part(tied: Step, *given: Any) -> Any:
    """An output layer in an .apr file is compared to the embedding by the first numbers alone."""
    equal = torch.equal
    with patch.object(torch, "equal", lambda one, other: equal(one.flatten()[:PART], other.flatten()[:PART])):
        return tied(*given)


@wrong_step("impl.checkpoint:_stored_tensors")
def tied_by_parts_of_bytes(stored: Step, folder: Path) -> Any:
    """A large output layer and the embedding that it is said to be are compared by parts of as many bytes, whatever their dtypes."""
    found = stored(folder)
    head, embedding = (found.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if head and embedding and head.dtype != embedding.dtype and head.shape[0] * head.shape[1] * head.dtype.itemsize > 16 * PART:
        raise ValueError(f"{folder}: lm_head.weight differs from model.embed_tokens.weight")
    return found


@wrong_step("impl.apr_write:fits")
def apr_nan_of_a_later_part_passes(fits: Step, dtype: Any, tensor: Any) -> Any:
    """The largest number is Python's `max` of those of the parts, which passes NaN over unless it comes first."""
    largest = max(part.abs().max().item() for part in tensor.flatten().split(PART))
    return fits(dtype, torch.tensor([largest], dtype=tensor.dtype))


@wrong_step("impl.merge:merge_adapter")
def merged_nan_of_a_later_part_passes(merge: Step, *given: Any, **named: Any) -> Any:
    """Only the first numbers of a merged weight have to be finite."""
    finite = torch.isfinite
    with patch.object(torch, "isfinite", lambda tensor: finite(tensor.flatten()[:PART])):
        return merge(*given, **named)


@wrong_step("impl.checkpoint:save_checkpoint")
def saved_nan_of_a_later_part_passes(save: Step, *given: Any, **named: Any) -> None:
    """Only the first numbers of a saved tensor have to be finite."""
    finite = torch.isfinite
    with patch.object(torch, "isfinite", lambda tensor: finite(tensor.flatten()[:PART])):
        save(*given, **named)
