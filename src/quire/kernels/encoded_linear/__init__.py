"""Products by rows that stay in the bytes of their scheme: int4, NF4, GGUF's blocks, int8 and fp8."""
