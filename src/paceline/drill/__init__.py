"""Break a training on purpose, from outside, and compare the result with an undisturbed run.

Each fault is a row of a table; recovery itself belongs to `launch` and `training`.
"""
