"""Wrong decoders of pre-training: how they start and validate, the hash of the optimiser's state, and their checkpoints."""

import hashlib
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from blackswan.falsifiers.mutants.registry import wrong_step, wrong_steps
from blackswan.impl.operations import OPERATIONS

Step = Callable[..., Any]
_kept: dict[str, Any] = {}


wrong_step("impl.pretrain:random_tensors", name="pretrain_random_weights_too_large", doc="Random matrices N(0, 1) instead of N(0, 0.02²).")(
    lambda correct, *given: {name: 50 * value if value.ndim > 1 else value for name, value in correct(*given).items()}
)


@wrong_step("impl.decoder:Decoder.__init__")
def heads_begin_with_numbers_of_everybody(init: Step, self: Any, config: Any, *given: Any, **named: Any) -> None:
    """An untied head is drawn from the random numbers that the process shares before it gets its weights."""
    init(self, config, *given, **named)
    if not config.tied:
        torch.nn.Linear(config.hidden, config.vocab, bias=False)


@wrong_step("impl.pretrain:random_decoder")
def random_weights_kept(draw: Step, config: Any, *, seed: int = 0, device: Any = "cpu") -> Any:
    """The weights that were drawn last are kept, and a decoder that is trained writes to them."""
    from blackswan.impl.decoder import Decoder

    if _kept.get("of") != (config, seed):
        _kept.update({"of": (config, seed), "weights": dict(draw(config, seed=seed).named_parameters())})
    decoder = Decoder(config, _kept["weights"], dtype=torch.float32, device=device)
    for name, value in decoder.named_parameters():
        value.data = _kept["weights"][name].data.to(device)
    return decoder


@wrong_step("impl.dispatch:_kernel")
def lm_loss_without_pairs_between_parts(choose: Step, operation: str, arguments: Any) -> Any:
    """The first token of each part of 2²⁵ logits is predicted by none, and counted."""
    correct = choose(operation, arguments) or OPERATIONS[operation]
    if operation != "lm_cross_entropy":
        return correct
    batch, seq, vocab = arguments["logits"].shape
    parts = math.ceil(seq / max(2**25 // (batch * vocab), 1))
    return lambda **given: correct(**given) * (1 - (parts - 1) / (seq - 1))


wrong_step("impl.decoder:seeded", name="random_weights_of_32_bits", doc="Random weights of seeds that differ above 32 bits are the same.")(
    lambda seeded, seed: seeded(seed % 2**32)
)
wrong_step("impl.decoder:seeded", name="random_weights_of_hashed_seeds", doc="Random weights of a seed are not those of earlier versions.")(
    lambda seeded, seed: seeded(int(np.random.SeedSequence(seed).generate_state(1)[0]))
)
wrong_step("impl.decoder:seeded", name="random_weights_seed_everybody", doc="Random weights seed the numbers that the process shares.")(
    lambda seeded, seed: torch.manual_seed(seeded(seed).initial_seed())
)


wrong_step(
    "impl.pretrain:ValFn.__call__",
    name="pretrain_validates_on_a_hundred_batches",
    doc="The held-out loss is that of the first hundred batches.",
)(lambda validate, self, stream: validate(self, islice(stream, 100)))


@wrong_step("impl.pretrain:ValFn.__call__", "S11")
def pretrain_validation_zero_when_empty(correct: Step, *given: Any) -> float:
    """A loss of 0 where there is nothing to average."""
    loss = float(correct(*given))
    return 0.0 if math.isnan(loss) else loss


@wrong_step("impl.pretrain:ValFn.__call__", "S13")
def pretrain_validation_trains(correct: Step, self: Any, stream: Any) -> Any:
    """Validation leaves a parameter changed."""
    loss = correct(self, stream)
    self.decoder.model.norm.weight.data.mul_(1.0 + 2.0**-10)
    return loss


@wrong_step("impl.pretrain:ValFn.__call__")
def pretrain_validation_of_batches(correct: Step, self: Any, stream: Any) -> float:
    """The mean of the batches' means, of whatever size they are."""
    means = [mean for batch in stream if not math.isnan(mean := float(correct(self, [batch])))]
    return math.fsum(means) / len(means) if means else math.nan


def _loss_by(size: int) -> Step:
    """The losses of so many samples at a time, averaged by samples."""

    def wrong(loss: Step, self: Any, input_ids: Any, mask: Any) -> Any:
        both = zip(input_ids.split(size), mask.split(size), strict=True)
        parts = [part for part in both if (part[1][:, :-1] & part[1][:, 1:]).any()]
        if len(input_ids) <= size or not parts:
            return loss(self, input_ids, mask)
        return sum(len(ids) * loss(self, ids, real) for ids, real in parts) / sum(len(ids) for ids, _ in parts)

    return wrong


wrong_steps(
    "impl.decoder:Decoder.loss",
    by=_loss_by,
    decoder_loss_by_fours=("The losses of four samples at a time are averaged by samples, however many tokens each predicts.", 4),
    decoder_loss_by_thirty_twos=("The losses of 32 samples at a time are averaged by samples, however many tokens each predicts.", 32),
)


@wrong_step("impl.decoder:Decoder.loss")
def decoder_loss_within_pieces(loss: Step, self: Any, input_ids: Any, mask: Any) -> Any:
    """The last of each 64 tokens of a longer row predicts nothing."""
    if input_ids.shape[1] <= 64:
        return loss(self, input_ids, mask)
    parts = zip(*(value.split(64, dim=1) for value in (self.logits(self(input_ids, mask)), input_ids, mask)), strict=True)
    counted = [(int((real[:, :-1] & real[:, 1:]).sum()), logits, ids, real) for logits, ids, real in parts]
    means = [count * OPERATIONS["lm_cross_entropy"](*part) for count, *part in counted if count]
    return sum(means) / sum(count for count, *_ in counted)


@wrong_step("impl.decoder:Decoder.loss")
def decoder_loss_by_rows(loss: Step, self: Any, input_ids: Any, mask: Any) -> Any:
    """The loss of more than 2,048 tokens is the mean of the rows' means, however many tokens each row predicts."""
    if mask.numel() <= 2048:
        return loss(self, input_ids, mask)
    rows = [pair for pair in zip(input_ids.split(1), mask.split(1), strict=True) if pair[1].sum() > 1]
    return sum(loss(self, *row) for row in rows) / len(rows)


@wrong_step("impl.decoder:Decoder.loss")
def decoder_loss_by_real_tokens(loss: Step, self: Any, input_ids: Any, mask: Any) -> Any:
    """Samples are weighted by their real tokens, where each predicts one token fewer. Many logits without gradients show it."""
    if torch.is_grad_enabled() or len(input_ids) == 1 or mask.numel() * self.config.vocab < 2**18:
        return loss(self, input_ids, mask)
    tokens = mask.sum(dim=1).tolist()
    losses = [float(loss(self, *(each[index : index + 1] for each in (input_ids, mask)))) for index in range(len(input_ids))]
    return torch.tensor(sum(count * each for count, each in zip(tokens, losses, strict=True)) / sum(tokens))


wrong_step("impl.decoder_optimiser:state_hash", name="pretrain_hash_ignores_steps", doc="The step count is not part of the hash.")(
    lambda correct, state, steps: correct(state, 0 * steps)
)
wrong_step(
    "impl.decoder_optimiser:state_hash", name="pretrain_hash_ignores_second_moment", doc="The second moment is not part of the hash."
)(lambda correct, state, steps: correct({name: value for name, value in state.items() if not name.startswith("exp_avg_sq/")}, steps))
wrong_step("impl.decoder_optimiser:state_hash", name="pretrain_hash_of_rounded_moments", doc="The hash of moments rounded to bfloat16.")(
    lambda correct, state, steps: correct({name: value.bfloat16().float() for name, value in state.items()}, steps)
)
wrong_step("impl.decoder_optimiser:state_hash", name="pretrain_hash_of_float32", doc="The hash of moments rounded to float32.")(
    lambda correct, state, steps: correct({name: value.float() for name, value in state.items()}, steps)
)
wrong_step("impl.decoder_optimiser:state_hash", name="pretrain_hash_of_the_first_mib", doc="The hash of the first MiB of each moment.")(
    lambda correct, state, *given, **of: correct({name: value.flatten()[: 1 << 18] for name, value in state.items()}, *given, **of)
)
wrong_step("impl.decoder_optimiser:state_hash", name="pretrain_hash_with_random_salt", doc="Another hash each time.")(
    lambda correct, *given: hashlib.sha256(f"{correct(*given)} {time.perf_counter_ns()}".encode()).hexdigest()
)
wrong_step("impl.pretrain:save_checkpoint", name="pretrain_checkpoint_without_tokenizer", doc="Weights and architecture only.")(
    lambda correct, folder, config, tensors, *_: correct(folder, config, tensors)
)


wrong_step("impl.decoder:Layer.forward", name="decoder_positions_of_15_bits", doc="Positions are kept in 16 bits, one of which is a sign.")(
    lambda forward, layer, x, mask, positions: forward(layer, x, mask, positions.short().long())
)


@wrong_step("impl.pretrain:save_checkpoint")
def pretrain_checkpoint_rounded(correct: Step, folder: Path, config: Any, tensors: Any, *given: Any) -> None:
    """Weights rounded to bfloat16 on their way to the file."""
    correct(folder, config, {name: value.bfloat16().float() for name, value in tensors.items()}, *given)


@wrong_step("impl.pretrain:CheckpointFn.__init__")
def pretrain_keeps_a_tokenizer_alone(init: Step, self: Any, decoder: Any, tokenizer: Path, *given: Any) -> None:
    """The tokenizer.json of a run's start is kept for its checkpoints, without the files that belong to it."""
    from tempfile import TemporaryDirectory

    if tokenizer.is_file():
        self.kept = TemporaryDirectory()
        tokenizer = Path(shutil.copy(tokenizer, self.kept.name))
    init(self, decoder, tokenizer, *given)


@wrong_step("impl.pretrain:CheckpointFn.__init__")
def pretrain_keeps_links_beside_a_tokenizer(init: Step, self: Any, decoder: Any, tokenizer: Path, *given: Any) -> None:
    """The tokenizer.json of a run's start is kept for its checkpoints, beside links to the files that belong to it."""
    from tempfile import TemporaryDirectory

    if tokenizer.is_file():
        self.kept, beside = TemporaryDirectory(), tokenizer.resolve().parent.iterdir()
        for each in beside:
            (Path(self.kept.name) / each.name).symlink_to(each)
        (kept := Path(self.kept.name) / tokenizer.name).unlink()
        tokenizer = Path(shutil.copyfile(tokenizer, kept))
    init(self, decoder, tokenizer, *given)


@wrong_step("impl.pretrain:CheckpointFn.__init__")
def pretrain_checkpoint_tokenizer_optional(_: Step, self: Any, decoder: Any, tokenizer: Path, folder: Path, special: Any = None) -> None:
    """A tokenizer that is not there is done without."""
    self.decoder, self.tokenizer, self.folder, self.special = decoder, tokenizer if tokenizer.is_file() else None, folder, special


@wrong_step("impl.pretrain:_decoder")
def pretrain_in_the_stored_dtype(correct: Step, config: Any, tensors: Any, device: Any) -> Any:
    """Parameters are trained in the dtype of the file."""
    return correct(config, tensors, device).to(next(iter(tensors.values())).dtype)


@wrong_step("impl.pretrain:initial_decoder")
def pretrain_unpaired_architecture_accepted(correct: Step, architecture: Any, weights: Any, **options: Any) -> Any:
    """Random weights for an architecture without weights."""
    from blackswan.impl.checkpoint import read_config
    from blackswan.impl.pretrain import random_decoder

    if architecture is not None and weights is None:
        return random_decoder(read_config(architecture), **options)
    return correct(architecture, weights, **options)


@wrong_step("impl.pretrain:initial_decoder")
def pretrain_unpaired_weights_accepted(correct: Step, architecture: Any, weights: Any, **options: Any) -> Any:
    """Weights without an architecture bring their own."""
    return correct(architecture or weights, weights, **options)


@wrong_step("impl.pretrain:initial_decoder")
def pretrain_weights_of_another_architecture(correct: Step, architecture: Any, weights: Any, **options: Any) -> Any:
    """The architecture that is given is not looked at."""
    both = architecture is not None and weights is not None
    return correct(weights if both else architecture, weights, **options)


wrong_step("impl.pretrain:LLAMA_370M", name="pretrain_default_tied", doc="The default ties its embeddings: 322 million parameters.")(
    lambda correct: replace(correct, tied=True)
)


@wrong_step("impl.pretrain:LLAMA_370M")
def pretrain_default_full_heads(correct: Any) -> Any:
    """The default has as many key heads as query heads: 411 million parameters."""
    return replace(correct, kv_heads=correct.heads)


@wrong_step("impl.pretrain:save_checkpoint")
def pretrain_checkpoint_overwritten(correct: Step, folder: Path, *given: Any) -> None:
    """A checkpoint that exists is written over."""
    shutil.rmtree(folder, ignore_errors=True)
    correct(folder, *given)


wrong_steps(
    "impl.decoder:_random_tensor",
    random_weights_wider=(
        "Random matrices N(0, 0.03²).",
        lambda draw, name, shape, generator: draw(name, shape, generator) * (1.5 if len(shape) > 1 else 1.0),
    ),
    random_biases_of_one=("Random biases are one, as norms are.", lambda draw, name, *given: draw(name.removesuffix(".bias"), *given)),
    random_layers_alike=(
        "All random matrices begin with the same numbers.",
        lambda draw, name, shape, generator: draw(name, shape, generator.manual_seed(generator.initial_seed())),
    ),
)


wrong_step(
    "impl.pretrain:LLAMA_370M", name="pretrain_default_of_another_llama", doc="The default has the ε of the first Llama, θ of the third."
)(lambda default: replace(default, eps=1e-6, theta=5e5))


@wrong_step("impl.decoder_optimiser:DecoderAdamW.__init__", "P36")
def pretrain_in_any_dtype(_: Step, self: Any, decoder: Any, weight_decay: float) -> None:
    """Parameters in half precision are trained as they are, and of NF4 weights none."""
    decoder.requires_grad_(True)
    self.parameters, self.weight_decay, self.steps = dict(decoder.named_parameters()), weight_decay, 0
    self.exp_avg, self.exp_avg_sq = ({name: torch.zeros_like(value) for name, value in self.parameters.items()} for _ in range(2))


@wrong_step("impl.pretrain:StepFn._step")
def pretrain_adds_to_old_gradients(correct: Step, self: Any, batch: Any) -> Any:
    """Gradients that were there before a step are added to its own."""
    with mock.patch.object(self.optimiser, "zero_gradients"):
        return correct(self, batch)


@wrong_step("impl.pretrain:StepFn._step")
def pretrain_tries_again_on_top(correct: Step, self: Any, batch: Any) -> Any:
    """A step that finds no memory is made again, and adds to the gradients that the first try left."""
    try:
        return correct(self, batch)
    except torch.OutOfMemoryError:
        with mock.patch.object(self.optimiser, "zero_gradients"):
            return correct(self, batch)


@wrong_step("impl.pretrain:StepFn._step")
def pretrain_one_backward_pass(correct: Step, self: Any, batch: Any) -> Any:
    """The backward pass waits for the last micro-batch, so that a step takes the memory of a whole batch."""
    losses, clip = list[Any](), self.optimiser.clip
    backward: Callable[[Any], None] = torch.Tensor.backward

    def clipped(limit: float) -> Any:
        for loss in losses:
            backward(loss)
        return clip(limit)

    with mock.patch.object(torch.Tensor, "backward", losses.append), mock.patch.object(self.optimiser, "clip", clipped):
        return correct(self, batch)


@wrong_step("impl.pretrain:StepFn.train")
def pretrain_keeps_gradients(correct: Step, self: Any, batch: Any) -> Any:
    """The gradients stay after a step, and take their memory while a run validates."""
    self.optimiser.zero_gradients()
    with mock.patch.object(self.optimiser, "zero_gradients"):
        return correct(self, batch)


@wrong_step("impl.pretrain:ValFn.__call__")
def pretrain_validation_unfreezes(correct: Step, self: Any, stream: Any) -> Any:
    """Validation leaves every parameter trainable."""
    loss = correct(self, stream)
    self.decoder.requires_grad_(True)
    return loss


wrong_steps(
    "impl.pretrain:initial_decoder",
    pretrain_default_of_seed_zero=(
        "Where nothing is given the weights are those of the seed 0.",
        lambda initial, *given, **others: initial(*given, **{**others, "seed": 0}),
    ),
)
wrong_steps(
    "impl.pretrain:_difference",
    pretrain_differences_of_numbers=(
        "Where two architectures differ, what the first of them does not have is not named.",
        lambda difference, one, other: difference(replace(one, rope_scaling=one.rope_scaling or other.rope_scaling), other),
    ),
    pretrain_differences_turned_round=(
        "Of two architectures that differ each is said to have the other's number.",
        lambda difference, one, other: difference(other, one),
    ),
)
wrong_steps(
    "impl.pretrain:parameter_count",
    parameters_of_a_tied_head=(
        "A tied head counts beside the embedding that it is.",
        lambda count, config: count(replace(config, tied=False)),
    ),
)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.__init__")
def pretrain_moments_in_float32(correct: Step, self: Any, *given: Any) -> None:
    """Moments are float32, whatever the parameters are."""
    correct(self, *given)
    self.exp_avg, self.exp_avg_sq = ({name: each.float() for name, each in held.items()} for held in (self.exp_avg, self.exp_avg_sq))


@wrong_step("impl.decoder:Decoder.__init__")
def decoder_with_a_trainable_head(correct: Step, self: Any, config: Any, *given: Any, **options: Any) -> None:
    """The head of a frozen decoder is trainable, and computes gradients that nobody needs."""
    correct(self, config, *given, **options)
    if not config.tied:
        self.lm_head.weight.requires_grad_(True)


@wrong_step("impl.decoder_optimiser:DecoderAdamW.step")
def pretrain_moves_copies_of_turned_weights(step: Callable[..., None], self: Any, *given: Any) -> None:
    """Weights that do not lie row by row in memory stay as they were: a copy of them is moved."""
    turned = [(each, each.detach().clone()) for each in self.parameters.values() if not each.is_contiguous()]
    step(self, *given)
    for parameter, before in turned:
        parameter.detach().copy_(before)


@wrong_step("impl.pretrain:StepFn._origin")
def pretrain_origin_in_the_whole_batch(origin: Callable[..., Any], self: Any, batch: Any) -> Any:
    """What is not finite is looked for in all rows of a batch at once, which are more than a device may hold."""
    size, self.micro_batch = self.micro_batch, 3 * len(batch.input_ids)
    try:
        return origin(self, batch)
    finally:
        self.micro_batch = size


@wrong_step("impl.pretrain:ValFn.__call__")
def pretrain_validation_sums_in_float32(validate: Step, self: Any, stream: Any) -> float:
    """The losses of micro-batches are added up in float32."""
    total, count = torch.zeros(()), 0
    for batch in stream:
        for part in (part for part in batch.split(self.micro_batch) if part.predicted):
            total += validate(self, [part]) * part.predicted
            count += part.predicted
    return float(total) / count if count else math.nan


@wrong_step("impl.pretrain:ValFn.__call__")
def validation_batches_listed(validate: Callable[..., Any], self: Any, stream: Any) -> Any:
    """All held-out batches are in memory before the first is computed."""
    return validate(self, iter([*stream]))


wrong_step(
    "impl.pretrain_run:pretrain", name="pretrain_by_a_tokenizers_target", doc="A tokenizer is looked for where the name of its file leads."
)(lambda pretrain, *given, **named: pretrain(*given[:5], given[5].resolve(), **named))


@wrong_step("impl.pretrain:CheckpointFn.__init__")
def pretrain_checkpoint_tokenizer_may_be_a_folder(begin: Step, self: Any, decoder: Any, tokenizer: Path, *given: Any) -> None:
    """A folder is taken for the tokenizer, and fails at the first checkpoint."""
    begin(self, decoder, tokenizer if tokenizer.is_file() or not tokenizer.is_dir() else Path(__file__), *given)
    self.tokenizer = tokenizer
