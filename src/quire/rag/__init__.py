"""Retrieval: files to passages, an index of them, and prompts with the passages that answer a question."""
