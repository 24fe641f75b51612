"""LoRA adapters: reading them, cutting them into blocks, keeping them in host memory."""
