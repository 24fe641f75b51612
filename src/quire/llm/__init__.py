"""The engine in the caller's own process."""
