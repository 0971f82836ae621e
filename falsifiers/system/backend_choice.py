"""Which backend computes the steps of which model on which device, and whether its kernels fit a GPU."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from blackswan.falsifiers.numeric.comparison import Comparison, value_at_least, value_at_most
from blackswan.falsifiers.system.same import same
from blackswan.falsifiers.system.trial import Trial
from blackswan.falsifiers.system.workloads import FAMILIES

if TYPE_CHECKING:
    pass


SHARED_MEMORY = 227 * 1024
"""Bytes that a program may have on an H100 (CUDA C++ Programming Guide, compute capability 9.0)."""


MANY_TOKENS, KERNELS = 200_000, 14
"""Tokens of a step, more than programs along the second axis of a launch; kernels that are launched."""


PROGRAMS = (2**31 - 1, 65535, 65535)
"""Programs along each axis of a launch (CUDA C++ Programming Guide, maximum dimensions of a grid of thread blocks)."""


def chosen_where_they_fit(trial: Trial) -> Iterator[Comparison]:
    """By every backend that a user may name, on a GPU, a CPU and another accelerator: architectures that the layers hold, and others, for
    the size of a head, NF4 blocks that do not end where the next weight begins, or quantised absmax."""
    rng = trial.rng("fit")
    base = {"family": str(rng.choice(FAMILIES)), "vocab": 40, "layers": 1, "heads": 2, "kv_heads": 1, "eps": 1e-6, "theta": 1e4}
    fitting = {**base, "hidden": 128, "intermediate": int(rng.integers(50, 200)), "head_dim": int(rng.choice([8, 30, 256]))}
    nf4, card = {"quantize_nf4": True}, f"cuda:{rng.integers(16)}"
    asked: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
        ("plain", fitting, {}, None),
        ("NF4", fitting, nf4, None),
        ("double quantisation", fitting, {**nf4, "double_quantize": True}, "double_quantize"),
        ("the widest head", {**fitting, "head_dim": 256}, {}, None),
        ("a wide head", {**fitting, "head_dim": 258}, {}, "head_dim"),
        ("NF4 blocks of queries", {**fitting, "hidden": 66, "head_dim": 34}, nf4, "q_proj"),
        ("NF4 blocks of keys alone", {**fitting, "hidden": 32, "head_dim": 34}, nf4, "q_proj"),
        ("NF4 blocks of gate and up", {**fitting, "hidden": 96, "intermediate": 97, "head_dim": 128}, nf4, "gate_proj"),
        ("no blocks", {**fitting, "hidden": 66, "head_dim": 34}, {}, None),
    ]
    for name, architecture, settings, why in asked:
        for kind, backend in (
            ("cuda", "auto"),
            (card, "auto"),
            ("cuda", "torch"),
            (card, "fused"),
            ("cpu", "auto"),
            ("cpu", "fused"),
            ("xpu", "auto"),
            ("xpu", "fused"),
        ):
            reason = "CUDA" if kind == "xpu" or (kind, backend) == ("cpu", "fused") else why
            ask = partial(trial.devices.backend, kind, architecture, {**settings, "backend": backend})
            label = f"{name}, {backend} on {kind}"
            if backend == "fused" and reason:
                yield trial.refuses(label, ask, f"fused.*{reason}.*torch", "ValueError")
                continue
            runs, said = ask()
            told = reason if backend == "auto" and kind != "cpu" else None
            yield from same(
                label,
                (backend != "torch" and kind.startswith("cuda") and not why, True),
                (runs, said is None if told is None else told in str(said)),
            )
    for backend in ("auto", "torch"):
        runs = trial.devices.backend_of_opened("cuda", {**fitting, "vocab": 257}, {"backend": backend})
        yield from same(f"an adapter that was opened, {backend} on cuda", backend == "auto", runs)
    yield from _kernels_run(trial)
    yield from _tiles_fit(trial)
    launched = trial.devices.programs(MANY_TOKENS)
    if launched:  # without Triton there are none
        yield value_at_least("kernels that are launched", len({kernel for kernel, *_ in launched}), KERNELS)
    for kernel, axis, programs in launched:
        yield value_at_most(f"programs of {kernel} along axis {axis}", programs, PROGRAMS[axis])


def _kernels_run(trial: Trial) -> Iterator[Comparison]:
    """Kernels run where Triton can be imported and there is a card, or its interpreter is asked for in any of its words; where not, the
    reason says which of these it is, and of a Triton that is there and broken what it says itself."""
    words = (*("1", "true", "TRUE", "yes", "On", "y"), *("0", "", "false", "no", "2", None))
    for card, (number, word) in product((True, False), enumerate(words)):
        found = trial.devices.kernels_run(card, word, None)
        yield from same(f"a card {card}, TRITON_INTERPRET={word}", card or number < 6, found is None)
        if found is not None:
            yield from same(f"what is missing, TRITON_INTERPRET={word}", (True, True), ("CUDA" in found, "TRITON_INTERPRET=1" in found))
    for card, error in product((True, False), (ModuleNotFoundError("No module named 'triton'"), ImportError("libtriton is broken"))):
        for word in ("1", "0"):
            found = str(trial.devices.kernels_run(card, word, error))
            yield from same(f"{error}, a card {card}, {word}", (True, True), (str(error) in found, "blackswan-contracts[kernels]" in found))


def _tiles_fit(trial: Trial) -> list[Comparison]:
    """The tiles of a program of attention fit a GPU's shared memory for heads of any size: one of queries, for the gradients one of dy as
    well (or one each of keys and values), and two for every load in flight. Compiled kernels take that, and 4 KiB at most."""
    found = []
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        for head in (16, 64, 72, 128, 136, 256):
            width = max(16, 1 << (head - 1).bit_length())
            for kernel, (stay, loaded, stages) in trial.devices.tiles(head, dtype).items():
                taken = width * size * ((1 + ("gradient" in kernel)) * stay + 2 * stages * loaded)
                found.append(value_at_most(f"bytes of tiles, {kernel} of {dtype}, head {head}", taken, SHARED_MEMORY - 4096))
    return found
