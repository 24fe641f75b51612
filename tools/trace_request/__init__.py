"""Which files of Quire one streamed chat request passes through: `python -m tools.trace_request`."""
