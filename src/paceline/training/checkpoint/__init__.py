"""Checkpoints: save, load under another plan, and what makes a training the same.

Nothing read here is unpickled without an allow-list.
"""
