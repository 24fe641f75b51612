"""Simulated devices: the real scheduler and memory over a runner that only charges time."""
