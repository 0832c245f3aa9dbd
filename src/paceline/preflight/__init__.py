"""Checks of a training before it is queued, in one table.

Checks while it runs belong to `doctor`.
"""
