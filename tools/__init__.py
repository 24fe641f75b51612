"""The project's own checks, run by `make check`."""
