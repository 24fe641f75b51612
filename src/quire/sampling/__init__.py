"""Logits to tokens: each row by its own parameters, the whole batch in one pass."""
