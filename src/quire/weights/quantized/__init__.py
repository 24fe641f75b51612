"""Checkpoints that other packages quantized: which tensors belong to a weight, and its encoded rows."""
