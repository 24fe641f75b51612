"""Adapters' matrices into tiles."""
