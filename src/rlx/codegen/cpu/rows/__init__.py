"""Loop nests: maps, reductions, softmax and norms."""
