"""One file per architecture. Each owns its map from Hugging Face names; variants are parameters."""
