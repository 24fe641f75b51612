"""Rows in eight-bit floating point, each with its own scale."""
