"""Packs adapters' matrices into tiles."""
