"""Debugging a run from its files: where two runs differ.

Nothing here changes a run folder.
"""
