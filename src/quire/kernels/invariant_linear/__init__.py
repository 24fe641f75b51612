"""Batch-invariant GEMMs: a row's bits do not depend on the other rows."""
