"""Attention within whole sequences, for encoders: every token sees all of its own sequence."""
