"""The wire formats: pydantic models for what comes in, typed dicts for what goes out."""
