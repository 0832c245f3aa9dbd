"""Break a training on purpose, from outside, and see whether anything was lost."""
