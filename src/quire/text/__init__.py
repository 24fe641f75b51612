"""Text in and out: tokenizers, chat templates, streamed text, stop strings."""
