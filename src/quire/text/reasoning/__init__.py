"""Thoughts that a model writes before its answer, told apart from it."""
