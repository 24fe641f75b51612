"""Replicas: several engines that serve one model, and which of them gets a request."""
