"""Number formats: how a matrix is kept and multiplied. A Linear is handed one and knows no more."""
