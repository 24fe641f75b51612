"""The engine in a process of its own: ZeroMQ, msgspec, supervision."""
