"""Calls of tools: found in what a model writes, one file per format, and described to models whose template cannot."""
