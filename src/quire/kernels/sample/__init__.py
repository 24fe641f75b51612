"""Logits to tokens: filters, draws, log probabilities."""
