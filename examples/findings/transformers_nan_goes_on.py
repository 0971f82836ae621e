"""A run of transformers' Trainer whose head is NaN from the start.

Where: trainer.py:1925 adds the mean of former losses for one that is not finite, and nothing else looks at it.
Explains transformers:TRAINER, transformers:TRAINER_ONE_BATCH: TRN-NON-FINITE.
"""

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

rows = [{"input_ids": torch.arange(1, 5) + i, "labels": torch.tensor(i % 2)} for i in range(8)]
sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
model = LlamaForSequenceClassification(LlamaConfig(**sizes))
model.score.weight.data[0, 0] = float("nan")
how = {"max_steps": 3, "logging_steps": 3, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
trainer = Trainer(model, TrainingArguments(**how), train_dataset=rows)
trainer.train()
print("expected an error, got", trainer.state.global_step, "steps and the loss", trainer.state.log_history[0]["loss"])
