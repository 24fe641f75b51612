"""Attention over paged K and V."""
