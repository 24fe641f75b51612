"""Rotary position embedding, fused with the store of K and V into pages."""
