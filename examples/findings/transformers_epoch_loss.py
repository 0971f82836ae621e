"""The loss that transformers' Trainer logs of an epoch of three samples in batches of two and one, at a rate of 0.

Where: trainer.py:2262 divides the sum of the steps' means by their number, and the last one has fewer samples.
Explains transformers:TRAINER, transformers:TRAINER_ONE_BATCH: TRN-VALIDATION-LOSS.
"""

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(0)
rows = [{"input_ids": torch.arange(1, 5) + i, "labels": torch.tensor(i % 2)} for i in range(3)]
sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
model = LlamaForSequenceClassification(LlamaConfig(**sizes, initializer_range=1.0))
how = {"per_device_train_batch_size": 2, "learning_rate": 0.0, "num_train_epochs": 1, "logging_strategy": "epoch"}
quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "log_level": "error"}
trainer = Trainer(model, TrainingArguments(**how, **quiet), train_dataset=rows, eval_dataset=rows)
trainer.train()
print("mean over the samples: expected", trainer.evaluate()["eval_loss"], "got", trainer.state.log_history[0]["loss"])
