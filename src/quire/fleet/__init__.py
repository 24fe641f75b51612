"""Several engines behind one address, and several models on one GPU: replicas, routing, slices, packing."""
