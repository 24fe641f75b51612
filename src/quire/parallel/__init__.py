"""Many ranks: groups of processes with collectives, and which part of a model each rank holds."""
