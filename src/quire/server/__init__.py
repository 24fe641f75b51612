"""HTTP: OpenAI's endpoints, streaming, keys, limits, health."""
