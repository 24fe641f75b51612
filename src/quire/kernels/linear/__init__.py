"""GEMMs of unquantized weights, with the library's fastest algorithm on this GPU."""
