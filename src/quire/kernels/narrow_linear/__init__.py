"""The product of one token with a large matrix: as fast as the matrix can be read."""
