"""Root mean square and layer normalisation, with or without the residual sum."""
