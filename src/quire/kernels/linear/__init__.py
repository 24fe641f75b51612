"""Products of tokens with a large matrix, by whichever of the library's algorithms is fastest on this chip."""
