"""Training: LoRA and QLoRA adapters of the models that are served, over the same layers and model files."""
