"""Compiles every Triton kernel that the engine launches for a GPU that is not there. See `__main__`."""
