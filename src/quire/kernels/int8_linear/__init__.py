"""Weights of linear layers in int8, activations quantized per token on the fly."""
