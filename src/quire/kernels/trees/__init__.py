"""Accepting token trees: the path that the target chose is followed, and its pages move to their places."""
