"""Kernels: one folder per operation, a plain torch reference and faster alternatives beside it."""

from quire.kernels.registry import alternatives, choose, operations

__all__ = ["alternatives", "choose", "operations"]
