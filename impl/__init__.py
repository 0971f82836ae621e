"""QLoRA classification fine-tuning of Llama, Qwen2 and Qwen3 decoders in PyTorch."""
