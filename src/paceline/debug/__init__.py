"""Debugging a run: where two runs differ; one step, repeated on one process.

Nothing here changes a run folder.
"""
