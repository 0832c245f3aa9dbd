"""The training of one rank: set-up, step, loop, evaluation, checkpoints.

How a plan changes a model belongs to `parallel`. (`paceline.train` is the function; a package of that name
would hide it.)
"""
