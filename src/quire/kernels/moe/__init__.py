"""Mixture of experts: each token goes through the few experts that the router chose for it."""
