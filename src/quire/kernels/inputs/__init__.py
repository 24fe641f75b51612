"""A step's inputs, gathered on the device from what it remembers of each row."""
