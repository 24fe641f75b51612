"""Causal attention within packed sequences, forward and backward, dense or block-sparse."""
