"""Break a training on purpose, from outside, and compare what came of it with an undisturbed run.

Each fault is a row of a table; recovery itself belongs to `launch` and `training`.
"""
