"""Wrong writers of `.apr` files: one step of `impl` replaced while the subject runs."""

import math
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps

Step = Callable[..., Any]


def _beginning(file: Any, most: int = 2**20) -> bytes:
    file.seek(0)
    found: bytes = file.read(most)
    return found


wrong_steps(
    "impl.apr_write:ROW_MAJOR",
    apr_written_without_row_major=("The flag of row-major order is left out.", lambda _: 0),
)


@wrong_step("impl.apr_write:header_checksum")
def apr_header_checksum_over_zeros(_: Step, header: bytes) -> int:
    """The header's checksum is that of all its 64 bytes, its own field being zero."""
    return zlib.crc32(header)


wrong_steps(
    "impl.apr_write:_padded",
    apr_written_without_padding=("Parts follow each other without padding.", lambda _, size: size),
)
wrong_steps("impl.apr_write:_checksum", apr_footer_of_zeros=("Four zeros stand in the place of the checksum.", lambda *_: 0))
wrong_steps(
    "impl.apr_write:_in_order",
    apr_written_in_the_models_order=("The index is in the order of the model, not of the names' bytes.", lambda _, names: list(names)),
)


@wrong_step("impl.apr_write:whole_file")
@contextmanager
def apr_written_over(_: Step, path: Path) -> Iterator[Path]:
    """A file that is there is written over."""
    yield path.parent


@wrong_step("impl.apr_write:whole_file")
@contextmanager
def apr_tokenizer_written_over(whole_file: Step, path: Path) -> Iterator[Path]:
    """An export overwrites the files that lie beside its own, such as another model's tokenizer."""
    with whole_file(path) as partial:
        yield partial
        for each in partial.iterdir():
            path.with_name(each.name).unlink(missing_ok=True)


@wrong_step("impl.apr_write:whole_file")
@contextmanager
def apr_names_are_patterns(whole_file: Step, path: Path) -> Iterator[Path]:
    """A pattern looks for the files beside, does not match a name with brackets, and they are overwritten."""
    with whole_file(path) as partial:
        yield partial
        for each in partial.iterdir() if "[" in path.name else ():
            path.with_name(each.name).unlink(missing_ok=True)


@wrong_step("impl.apr_write:whole_file")
@contextmanager
def files_moved_as_far_as_they_go(_: Step, path: Path) -> Iterator[Path]:
    """Files move to beside each other one after the other, until a name is in use."""
    from blackswan.impl import folder

    folder._require_free(path)
    with folder._partial(path) as partial:
        yield partial
        for each in sorted(partial.iterdir(), key=lambda each: each.name == path.name):
            folder._require_free(path.with_name(each.name))
            each.rename(path.with_name(each.name))


@wrong_step("impl.folder:remove_left_over")
def apr_left_overs_stay(remove: Step, folder: Path, prefix: str) -> None:
    """An export never removes the half-written file of one that was killed, which may be as large as the model."""
    if not prefix.removesuffix(".").endswith(".apr"):
        remove(folder, prefix)


wrong_step("impl.apr_write:fits", name="apr_nan_written", doc="NaN, which is not beyond any number, is written.")(
    lambda fits, dtype, tensor: fits(dtype, tensor.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf))
)
wrong_step(
    "impl.apr_write:fits", name="apr_beyond_float32_written", doc="A number of float64 that float32 does not hold is written in q8."
)(lambda fits, dtype, tensor: fits(dtype, tensor.clip(-3e38, 3e38) if dtype.name == "AprQ8" else tensor))


def _by_scales(content: Any, tensor: Any, scales: Callable[[Any], Any]) -> Any:
    """Gives each element of AprQ4's content the step by the scale that a function makes of its block's largest magnitude; the scales."""
    import torch

    flat = tensor.float().reshape(-1)
    values = torch.nn.functional.pad(flat, (0, -len(flat) % 32)).view(-1, 32)
    scale = scales(values.abs().amax(1, keepdim=True))
    codes = torch.where(scale > 0, values / scale.float(), 0).round().clamp(-8, 7).add(8).to(torch.uint8)
    content.view(-1, 18)[:, 2:] = codes[:, ::2] | codes[:, 1::2] << 4
    return scale


@wrong_step("impl.apr_write:encoded")
def apr_steps_of_unrounded_scale(encoded: Step, dtype: Any, tensor: Any) -> Any:
    """The steps of AprQ4 are those of the scale before it is rounded to float16."""
    content = encoded(dtype, tensor)
    if dtype.name == "AprQ4":
        _by_scales(content, tensor, lambda largest: largest / 7)
    return content


@wrong_step("impl.apr_write:encoded")
def apr_scales_rounded_up(encoded: Step, dtype: Any, tensor: Any) -> Any:
    """The scales of AprQ4 are the next number of float16."""
    content = encoded(dtype, tensor)
    if dtype.name == "AprQ4":
        import torch

        blocks = content.view(-1, 18)
        blocks[:, :2] = (blocks[:, :2].contiguous().view(torch.int16) + 1).view(torch.uint8)
    return content


@wrong_step("impl.apr_write:encoded")
def apr_largest_is_eight_steps(encoded: Step, dtype: Any, tensor: Any) -> Any:
    """The largest magnitude of AprQ4 has eight steps, as a number below zero may have; one above zero comes back a step too small."""
    content = encoded(dtype, tensor)
    if dtype.name == "AprQ4":
        scale = _by_scales(content, tensor, lambda largest: (largest / 8).half())
        content.view(-1, 18)[:, :2] = scale.contiguous().view(content.dtype)
    return content


@wrong_step("impl.apr_write:encoded")
def apr_nibbles_written_swapped(encoded: Step, dtype: Any, tensor: Any) -> Any:
    """The first of two elements of AprQ4 is written into the high half."""
    content = encoded(dtype, tensor)
    if dtype.name == "AprQ4":
        blocks = content.view(-1, 18)
        blocks[:, 2:] = blocks[:, 2:] >> 4 | blocks[:, 2:] << 4
    return content


@wrong_step("impl.apr_write:_content")
def apr_vectors_quantised(content: Step, name: str, tensor: Any, dtype: str | None) -> Any:
    """Norms and biases are quantised with the matrices."""
    from blackswan.impl.apr_dtypes import WRITTEN, encoded

    chosen = WRITTEN.get(dtype or "")
    if chosen is None or chosen.plain is not None:
        return content(name, tensor, dtype)
    return chosen, encoded(chosen, tensor)


@wrong_step("impl.apr_write:save_apr")
def apr_written_in_the_order_of_the_old(save: Step, *given: Any) -> None:
    """A file that is written of another one keeps its order of rows, under names that say the other order."""
    with patch("blackswan.impl.apr_checkpoint._rows_in_halves", lambda rows, _: rows):
        save(*given)


wrong_steps(
    "impl.apr_write:require_tensors",
    apr_of_any_tensors=("Tensors in memory are written under the architecture's names and shapes, whatever they are.", lambda *_: None),
)
wrong_steps(
    "impl.apr_write:CODES",
    apr_older_codes_written=(
        "AprQ4 and AprQ8 are written with the codes of older files, which newer programs read as others.",
        lambda codes: {dtype: {128: 8, 129: 9}.get(code, code) for dtype, code in codes.items()},
    ),
)
wrong_steps("impl.apr_write:HALVES", apr_written_rope_type_of_pairs=("Written files say that neighbours turn together.", lambda _: 0))
wrong_steps(
    "impl.apr_write:SPECIAL_TOKENS",
    apr_end_token_by_another_key=("Special tokens are written where nobody reads them.", lambda said: {key: key for key in said}),
)
wrong_steps(
    "impl.apr_write:_checksum",
    apr_checksum_of_the_first_mib=("The checksum at the end is that of the first MiB.", lambda _, file: zlib.crc32(_beginning(file))),
    apr_written_file_read_whole=(
        "The checksum is taken of a file that is in memory as a whole.",
        lambda _, file: zlib.crc32(_beginning(file, -1)),
    ),
)
wrong_steps(
    "impl.apr_write:fits",
    apr_scale_beyond_float16=("A scale of AprQ4 may be infinite.", lambda fits, dtype, tensor: fits(replace(dtype, name="plain"), tensor)),
)


@wrong_step("impl.apr_write:_write")
def apr_written_by_one_call(_: Step, file: Any, at: int, content: Any) -> None:
    """Each tensor is written by one call of pwrite, which takes 2 GiB at most, and the rest of it is lost."""
    os.pwrite(file.fileno(), content, at)


@wrong_step("impl.apr_write:_content")
def apr_of_float64_refused(content: Step, name: str, tensor: Any, dtype: str | None) -> Any:
    """A checkpoint in float64, which the format does not have, is refused also where another dtype is asked for."""
    if str(tensor.dtype) == "torch.float64":
        raise ValueError(f"{name}: {tensor.dtype} is not in the format")
    return content(name, tensor, dtype)


wrong_step("impl.apr_write:encoded", name="apr_of_rows_alone", doc="A tensor that lies column by column cannot be written.")(
    lambda encoded, dtype, tensor: encoded(dtype, tensor.view(-1) if dtype.plain is not None else tensor)
)
