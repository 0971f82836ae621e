"""What `blackswan.guard` adds to a training run at its default settings: the same runs with and without it, in pairs, in one process.

    python -m benchmarks.guard [--steps 400] [--pairs 3] [--size small|0.5b] [--device cpu|cuda]

Each pair makes the same steps from the same weights, the two runs in an order that alternates. A run begins before the guard is made and
ends after it is taken away, so that reading the contracts and the first three checks count. On the CPU the seconds are those of the
process's own processor time, which a busy machine does not lengthen.
"""

import argparse
import contextlib
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import blackswan
from benchmarks import command
from benchmarks.timing import now
from blackswan.falsifiers.live.recorded import claims

SIZES = {
    "small": {"vocab_size": 2000, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4},
    "0.5b": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
}
KEY_VALUE_HEADS = {"small": 2, "0.5b": 2}
BATCH, MICRO, LENGTH, CLASSES, BOUND = 16, 2, 48, 5, 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints seconds and the ratio of each pair, and the median of the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=command.positive, default=400, help="of the optimiser, in a run (default: 400)")
    parser.add_argument("--pairs", type=command.positive, default=3, help="of runs (default: 3)")
    parser.add_argument("--size", choices=SIZES, default="small", help="of the model: small, or Qwen2.5-0.5B's shape (default: small)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        command.require_cuda()
    logging.getLogger("blackswan").setLevel(logging.ERROR)
    device, ratios = torch.device(options.device), []
    run(options.size, device, 3, guarded=False)  # what a process does once
    for pair in range(options.pairs):
        order = (False, True) if pair % 2 else (True, False)
        seconds = {guarded: run(options.size, device, options.steps, guarded) for guarded in order}
        ratios.append(seconds[True] / seconds[False])
        print(f"pair {pair + 1}: {seconds[False]:.1f} s without, {seconds[True]:.1f} s with: {ratios[-1]:.4f}", flush=True)
    print(f"with / without, median of {options.pairs}: {statistics.median(ratios):.4f}")
    return 0


def run(size: str, device: torch.device, steps: int, guarded: bool) -> float:
    """Seconds of a run of LoRA on a classifier, in mixed precision on a GPU."""
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    shape = {**SIZES[size], "num_key_value_heads": KEY_VALUE_HEADS[size], "num_labels": CLASSES, "pad_token_id": 0}
    lora = LoraConfig(task_type="SEQ_CLS", r=16, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(Qwen2ForSequenceClassification(Qwen2Config(**shape)).to(device), lora)  # type: ignore[arg-type]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    tokens = torch.randint(1, SIZES[size]["vocab_size"], (BATCH, LENGTH), device=device)
    labels = torch.randint(0, CLASSES, (BATCH,), device=device)
    claims.cache_clear()
    start = _clock(device)
    context = blackswan.guard(model, optimizer, max_norm=BOUND) if guarded else contextlib.nullcontext()
    with context as guard:
        for _ in range(steps):
            for ids, wanted in zip(tokens.chunk(MICRO), labels.chunk(MICRO), strict=True):
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits, wanted) / MICRO
                loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(trained, BOUND)
            optimizer.step()
            optimizer.zero_grad()
    seconds = _clock(device) - start
    if guard is not None:
        print("  " + guard.report().splitlines()[0])
    return seconds


def _clock(device: torch.device) -> float:
    return time.process_time() if device.type == "cpu" else now(device)


if __name__ == "__main__":
    command.start(main)
