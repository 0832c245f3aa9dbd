"""Check that a plan computes the same training as one process, on the user's own model.

References here share no code path with what they check.
"""
