"""Adapters: low-rank additions to products, a different one for each line."""
