"""Wrong adapters, and wrong merging of them."""

import math
from typing import Any
from unittest import mock

import numpy as np

from blackswan.falsifiers.mutants.changes import (
    Arguments,
    edited,
    in_bfloat16,
    pull,
    scaled_input,
    with_arguments,
    with_gradients,
    with_result,
    without,
)
from blackswan.falsifiers.mutants.registry import mutants, wrong_step, wrong_steps
from blackswan.reference.rows import as_rows, outer
from blackswan.reference.table import Operation


def _rank(a: Arguments) -> int:
    return int(a["lora_a"].shape[0])


def _scale(a: Arguments) -> float:
    return float(a["alpha"]) / _rank(a)


def _input_gradient_without_adapter(correct: Operation) -> Operation:
    return with_gradients(x=lambda _, dy, a: pull(correct, dy, {**a, "alpha": 0.0})["x"])(correct)


_scale_one = with_arguments(alpha=lambda a: float(_rank(a)))
_whole = with_arguments(alpha=lambda a: float(math.floor(a["alpha"])))
_negated = with_arguments(alpha=lambda a: -a["alpha"])
mutants(
    "lora_linear",
    lora_scale_alpha=("Scale alpha instead of alpha/rank.", with_arguments(alpha=lambda a: a["alpha"] * _rank(a)), "P23"),
    lora_scale_one=("Scale 1.", _scale_one, "P24"),
    lora_scale_sqrt_rank=("alpha/sqrt(rank).", with_arguments(alpha=lambda a: a["alpha"] * math.sqrt(_rank(a)))),
    lora_alpha_cut=("An alpha that is no whole number is cut to one: the update of an alpha of 2.5 is a fifth too small.", _whole),
    lora_adapter_dropped=("Adapter not applied.", with_arguments(alpha=lambda _: 0.0)),
    lora_bias_dropped=("Bias of the adapted projection dropped.", without("bias"), "S1"),
    lora_bias_scaled=("The scale applied to bias as well.", scaled_input("bias", _scale)),
    lora_input_rounded=(
        "The adapter sees the input in bfloat16.",
        edited(("(x @ lora_a.T) @ lora_b.T", "(in_bfloat16(x) @ lora_a.T) @ lora_b.T"), only="forward"),
        "P28",
        "bfloat16",
    ),
    lora_b_gradient_unscaled=(
        "Gradient of B without alpha/rank, as if B were stored multiplied.",
        with_gradients(lora_b=lambda gradient, _, a: gradient / _scale(a)),
        "S14",
    ),
    lora_a_gradient_zero=("Gradient of A lands on a copy.", with_gradients(lora_a=lambda gradient, *_: 0 * gradient), "P25, P26"),
    lora_input_gradient_without_adapter=("Input gradient from W alone.", _input_gradient_without_adapter),
    lora_factors_swapped_gradient=(
        "Gradient of A from the input with its features reversed.",
        with_gradients(lora_a=lambda _, dy, a: outer(_scale(a) * (dy @ a["lora_b"]), as_rows(a["x"])[:, ::-1])),
    ),
)
mutants(
    "lora_merge",
    lora_merge_scale_one=("Merge with scale 1.", _scale_one, "P24"),
    lora_merge_alpha_cut=("An alpha that is no whole number is cut to one, and the merged model is another one.", _whole),
    lora_merge_subtracts=("Merge with the wrong sign.", _negated),
    lora_merge_low_precision=(
        "The product B A rounded to bfloat16 before it is added.",
        with_result(lambda _, a: a["weight"] + in_bfloat16(_scale(a) * (a["lora_b"] @ a["lora_a"]))),
        "P28",
        "bfloat16",
    ),
    lora_merge_full_rank=(
        "A diagonal of 0.5 added to the update.",
        with_result(lambda merged, _: merged + 0.5 * np.eye(*merged.shape, dtype=merged.dtype)),
    ),
    lora_merge_in_whole_parts=(
        "Rows are merged 4,096 at a time, and the rest of them is left as it was.",
        with_result(
            lambda merged, a: (
                np.concatenate([merged[: len(merged) // 4096 * 4096], a["weight"][len(merged) // 4096 * 4096 :]])
                if len(merged) > 4096
                else merged
            )
        ),
    ),
)
mutants(
    "lora_unmerge",
    lora_unmerge_adds=("Unmerge adds once more.", _negated),
    lora_unmerge_scale_one=("Unmerge with scale 1.", _scale_one, "P24"),
)


def _bound(factor: Any) -> float:
    return 1 / math.sqrt(factor.shape[-1])


wrong_steps(
    "impl.classifier:initial_factor",
    by=lambda change: lambda initial, path, *given: change(initial(path, *given), "lora_A" in path),
    lora_initial_all_zero=("A and B start at zero, where neither has a gradient: LoRA never moves.", lambda factor, _: 0 * factor),
    lora_initial_b_not_zero=("B starts at 0.05: a fresh adapter changes the base.", lambda factor, is_a: factor + 0.05 * (not is_a)),
    lora_initial_a_constant=(
        "All of A is half its bound: rank 1.",
        lambda factor, is_a: factor.new_full(factor.shape, _bound(factor) / 2) if is_a else factor,
    ),
    lora_initial_a_positive=("A uniform in 0 … 1/√in.", lambda factor, _: factor.abs()),
    lora_initial_a_narrow=("A within half its bound.", lambda factor, _: factor / 2),
    lora_initial_a_by_rank=(
        "A within ±1/√rank, the fan of B.",
        lambda factor, is_a: factor * math.sqrt(factor.shape[1] / factor.shape[0]) if is_a else factor,
    ),
)


@wrong_step("impl.classifier:initial_factor")
def lora_initial_a_normal(initial: Any, path: str, shape: Any, generator: Any) -> Any:
    """A normal, of the same variance."""
    factor = initial(path, shape, generator)
    return factor.normal_(0, _bound(factor) / math.sqrt(3), generator=generator) if "lora_A" in path else factor


wrong_steps(
    "impl.classifier:_initial",
    head_bias_drawn=(
        "The head's bias starts as random as a factor of LoRA.",
        lambda initial, name, *given: initial(name.replace("score.bias", "bias"), *given),
    ),
    head_weight_wide=(
        "The head's weight starts within twice its bound.",
        lambda initial, name, *given: initial(name, *given) * (1 + (name == "score.weight")),
    ),
)
wrong_step("impl.classifier:initial_factor", name="lora_initial_a_repeated", doc="Every factor from the beginning of the seed's numbers.")(
    lambda initial, path, shape, generator: initial(path, shape, generator.manual_seed(generator.initial_seed()))
)
wrong_step("impl.pipeline:initial_trainable", name="lora_initial_seed_ignored", doc="The same start for every seed.")(
    lambda initial, config, adaptation, _: initial(config, adaptation, 0)
)


@wrong_step("impl.classifier:seeded")
def lora_initial_of_32_bits(seeded: Any, seed: int) -> Any:
    """Only the lower 32 bits of a seed count: runs whose seeds hold a date start alike, and their spread is too small."""
    return seeded(seed % 2**32)


wrong_step("impl.classifier:seeded", name="lora_initial_of_hashed_seeds", doc="A seed draws other numbers than in earlier versions.")(
    lambda seeded, seed: seeded(int(np.random.SeedSequence(seed).generate_state(1)[0]))
)


@wrong_step("impl.classifier:seeded")
def lora_initial_of_the_first_long_seed(seeded: Any, seed: int) -> Any:
    """The smallest seed that 32 bits do not hold starts as the seed 0 does."""
    return seeded(seed if seed != 2**32 else 0)


@wrong_step("impl.pipeline:ClassifyPipeline.from_pretrained")
def lora_initial_of_32_bits_on_checkpoints(from_pretrained: Any, folder: Any, config: Any, **named: Any) -> Any:
    """Only the lower 32 bits of a seed count where weights come from a checkpoint."""
    from blackswan.impl.classifier import initial_trainable

    def narrow(architecture: Any, adaptation: Any, seed: int) -> Any:
        return initial_trainable(architecture, adaptation, seed % 2**32)

    with mock.patch("blackswan.impl.pipeline.initial_trainable", narrow):
        return from_pretrained(folder, config, **named)


@wrong_step("impl.classifier:seeded")
def lora_initial_seeds_the_process(seeded: Any, seed: int) -> Any:
    """Start values are drawn from torch's own generator, so that every model seeds the random numbers of the program around it."""
    import torch

    return torch.manual_seed(seeded(seed).initial_seed())


@wrong_step("impl.classifier:initial_factor")
def lora_initial_on_the_default_device(initial: Any, path: str, shape: Any, generator: Any) -> Any:
    """Start values are made on torch's default device, where a generator of the CPU is refused or numbers have no content."""
    import torch

    return initial(path, shape, generator).to(torch.get_default_device())


@wrong_step("impl.classifier:initial_factor")
def lora_initial_in_the_default_dtype(initial: Any, path: str, shape: Any, generator: Any) -> Any:
    """Start values are rounded to torch's default dtype, which some libraries make bfloat16 for the whole process."""
    import torch

    factor = initial(path, shape, generator)
    return factor.to(torch.get_default_dtype()).to(factor.dtype)


@wrong_step("impl.pipeline:random_tensors")
def random_base_on_the_default_device(random: Any, *given: Any) -> Any:
    """Random base weights are on torch's default device, which a notebook may make a GPU for the whole process."""
    import torch

    return {name: tensor.to(torch.get_default_device()) for name, tensor in random(*given).items()}


@wrong_step("impl.tokens:Tokens.pad")
def tokens_on_the_default_device(pad: Any, *given: Any) -> Any:
    """The ids of texts are on torch's default device, which a notebook may make a GPU for the whole process."""
    import torch

    return tuple(tensor.to(torch.get_default_device()) for tensor in pad(*given))


@wrong_step("impl.operations.nf4:_nf4_midpoints")
def nf4_codebook_in_the_default_dtype(_: Any, device: Any) -> Any:
    """NF4's levels are made in torch's default dtype, which some libraries make bfloat16 for the whole process."""
    from blackswan.impl.operations import nf4

    codebook = nf4._library().get_4bit_type("nf4", device=device)
    return (codebook[:-1] + codebook[1:]) / 2


@wrong_step("impl.classifier:initial_factor")
def lora_initial_from_global_state(initial: Any, path: str, shape: Any, _: Any) -> Any:
    """The start depends on what drew random numbers before."""
    import torch

    return initial(path, shape, torch.default_generator)
