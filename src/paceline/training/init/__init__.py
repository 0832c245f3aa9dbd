"""Initial weights: recorded on the meta device, replayed where they are kept, compared with a plain construction.

Loading of checkpoints belongs to `training.checkpoint`.
"""
