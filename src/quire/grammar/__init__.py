"""From a schema, a regex or a grammar to the tokens that may come next: bit masks in numpy, no tensors."""
