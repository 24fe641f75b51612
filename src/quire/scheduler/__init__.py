"""Queues, admission and preemption: decides each Step. Never imports torch."""
