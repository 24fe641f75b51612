"""Blocks, block tables and the prefix index. Ids only, never tensors."""
