"""Contract-driven verification of QLoRA classification fine-tuning. Everything that is installed stands below this one import name."""
