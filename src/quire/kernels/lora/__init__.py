"""LoRA: low-rank additions to GEMMs, each row with its own adapter."""
