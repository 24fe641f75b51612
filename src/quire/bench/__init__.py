"""Measuring: workloads, experiments on this machine, what a model would need on another."""
