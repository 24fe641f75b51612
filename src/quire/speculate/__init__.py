"""Speculative decoding: proposers, draft lengths and acceptance."""
