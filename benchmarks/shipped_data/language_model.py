"""The tokenizer and the small Qwen2 language model that are trained on the shipped scripts."""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VOCABULARY = 1024
PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 128, 344, 4, 4, 2
MAX_POSITIONS = 512
STEPS = 1000
BATCH = 32
LEARNING_RATE = 3e-3
WARMUP = 0.06
WEIGHT_DECAY = 0.1
CLIP_NORM = 1.0
BIAS_STD = 0.2  # Qwen2 starts its Q/K/V biases at zero; these start away from it, so that forgetting them is always visible.

Progress = Callable[[str], None]


def train_tokenizer(texts: list[str], path: Path) -> None:
    """Train a byte-level BPE on `texts` and write it as `tokenizer.json`; any text round-trips because every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def encode(texts: list[str], tokenizer_path: Path) -> list[list[int]]:
    """Token ids of every text, each ended by <eos>."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    return [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(texts)]


def new_model(seed: int) -> Any:
    """A randomly initialised Qwen2 in float32, with Q/K/V biases away from zero."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for _, bias in _biases(model):
            bias.normal_(0.0, BIAS_STD)
    return model


def _biases(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if name.endswith("_proj.bias"))


def _batches(sequences: list[list[int]], rng: random.Random) -> Iterator[list[list[int]]]:
    """Endless shuffled batches; scripts of similar length share one, so that little of it is padding."""
    while True:
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]) + rng.random() * 16)
        batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
        rng.shuffle(batches)
        yield from ([sequences[index] for index in batch] for batch in batches)


def _loss(model: Any, batch: list[list[int]]) -> tuple[Any, int]:
    """Sum of the next-token losses (nats) of a batch of sequences [batch, seq], and the number of predicted tokens."""
    import torch
    from torch.nn import functional

    rows = [torch.tensor(sequence) for sequence in batch]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD_ID)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    logits = model(input_ids=ids, attention_mask=mask).logits
    targets = torch.where(mask.bool(), ids, -100)[:, 1:]
    total = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, int((targets != -100).sum())


def _optimiser(model: Any) -> Any:
    import torch

    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))


def _learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, then a half cosine down to a twentieth."""
    warmup = max(1, round(WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train_model(model: Any, sequences: list[list[int]], steps: int, seed: int, progress: Progress) -> None:
    """Train `model` in place for `steps` batches of next-token prediction, one script a row, as the classifier later reads them."""
    import torch

    optimiser = _optimiser(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _learning_rate_factor(step, steps))
    batches = _batches(sequences, random.Random(seed))  # noqa: S311 - reproducible order, no secret
    model.train()
    for step in range(1, steps + 1):
        total, count = _loss(model, next(batches))
        optimiser.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimiser.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            progress(f"step {step} of {steps}: training loss {total.item() / count:.4f}")
    model.eval()


def mean_loss(model: Any, sequences: list[list[int]]) -> float:
    """Mean next-token loss in nats over all tokens of `sequences`."""
    import torch

    with torch.no_grad():
        parts = [_loss(model, sequences[start : start + BATCH]) for start in range(0, len(sequences), BATCH)]
    return float(sum(total.item() for total, _ in parts) / sum(count for _, count in parts))


def without_biases(model: Any) -> Any:
    """A copy of `model` whose Q/K/V biases are zero."""
    import copy

    import torch

    bare = copy.deepcopy(model)
    with torch.no_grad():
        for _, bias in _biases(bare):
            bias.zero_()
    return bare
