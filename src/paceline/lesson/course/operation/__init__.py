"""A training on a real machine: plan it, find what is slow, survive a failure."""
