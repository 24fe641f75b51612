"""Placement of models on groups of GPUs, as AlpaServe (OSDI 2023) has it: a simulator, and a search that it guides."""
