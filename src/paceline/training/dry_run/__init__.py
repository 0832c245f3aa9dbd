"""Dry runs of a training step, without memory or other ranks: communication volume, checkpoint size.

Nothing here requires a process group with peers.
"""
