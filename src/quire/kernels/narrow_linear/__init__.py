"""GEMV: one token times a large matrix, as fast as the matrix can be read."""
