"""Sums, gathers and messages between processes that map the same memory."""
