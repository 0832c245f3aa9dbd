"""Checkpoints: save, load under another plan, and the identity of a training.

Nothing is unpickled without an allow-list.
"""
