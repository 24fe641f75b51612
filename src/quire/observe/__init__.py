"""Logs and counters. Standard library only: every room may use it, and upper rooms draw what it keeps."""
