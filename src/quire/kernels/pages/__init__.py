"""Moving whole blocks of the pool."""
