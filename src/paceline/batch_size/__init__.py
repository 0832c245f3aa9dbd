"""Batch sizes: what a larger batch costs in samples, and which batch pays."""
