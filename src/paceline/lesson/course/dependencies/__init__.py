"""Which computations parallelize."""
