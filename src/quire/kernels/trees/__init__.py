"""Accepting token trees: follows the path that the target chose and moves its K and V to their final slots."""
