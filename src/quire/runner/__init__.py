"""Rows, batch assembly, recorded passes and the forward pass itself."""
