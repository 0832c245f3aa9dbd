"""The one place where a model meets a plan: sharding, replication, recomputation, compilation, and the axes below.

Steps, optimizers and checkpoints belong to `training`.
"""
