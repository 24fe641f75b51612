"""When waiting requests may join those that run: one file per policy."""
