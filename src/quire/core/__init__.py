"""The engine's vocabulary: requests, sequences, steps, configs and errors. Standard library only."""
