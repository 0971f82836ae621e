"""A classifier in transformers' Trainer with four micro-batches a step, under `blackswan.guard`: it stops before the first step."""

import sys

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

import blackswan


def main(micro_batches: int = 4) -> int:
    """Status 1 and the story where a claim is false of the run, 0 and the report where all hold."""
    torch.manual_seed(0)
    rows = [{"input_ids": torch.arange(1, 5) + i, "labels": torch.tensor(i % 2)} for i in range(8)]
    sizes = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pad_token_id": 0,
    }
    how = {"per_device_train_batch_size": 8 // micro_batches, "gradient_accumulation_steps": micro_batches, "max_steps": 3}
    quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    guard = blackswan.guard.callback()
    model = LlamaForSequenceClassification(LlamaConfig(**sizes))
    try:
        Trainer(model, TrainingArguments(**how, **quiet), train_dataset=rows, callbacks=[guard]).train()
    except blackswan.GuardError as error:
        print(error)
        return 1
    print(guard.guard.report())
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
