"""Speculative decoding: who proposes tokens, how many, and which of them stay."""
