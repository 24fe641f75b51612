"""`quire bench lab|fit|sharing`: commands that the laboratory adds to `quire bench`."""
