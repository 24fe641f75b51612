"""Number formats: how a matrix is kept and multiplied. A Linear is handed a matrix and does not know its format."""
