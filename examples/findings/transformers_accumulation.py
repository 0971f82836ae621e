"""Loss and gradient norm of the same eight samples, in one batch and in four micro-batches, by transformers' Trainer.

Where: trainer.py:521 takes the model's `**kwargs` for num_items_in_batch; modeling_layers.py:194 drops it.
Explains transformers:TRAINER: TRN-RUN-STEPS.
"""

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

rows = [{"input_ids": torch.arange(1, 5) + i, "labels": torch.tensor(i % 2)} for i in range(8)]
sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
for steps in (1, 4):
    torch.manual_seed(0)
    how = {"per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps, "max_steps": 1, "logging_steps": 1}
    quiet = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    trainer = Trainer(LlamaForSequenceClassification(LlamaConfig(**sizes)), TrainingArguments(**how, **quiet), train_dataset=rows)
    trainer.train()
    print("micro-batches:", steps, "loss: expected 0.693, got", round(trainer.state.log_history[0]["loss"], 3))
