"""Apply a plan to a model: sharding, replication, recomputation, compilation, and the axes below.

Steps, optimizers and checkpoints belong to `training`.
"""
