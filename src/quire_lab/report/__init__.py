"""What experiments are given and hand back, and how findings become text, JSON, pictures and a page."""
