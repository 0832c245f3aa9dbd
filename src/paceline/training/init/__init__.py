"""Initial weights: recorded on the meta device, and replayed for each parameter on the rank that holds it.

Checkpoints do not belong here; see `training.checkpoint`.
"""
