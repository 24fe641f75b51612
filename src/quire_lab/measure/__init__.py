"""Measurements that experiments share: engines, load over time, replays on simulated devices, block sharing."""
