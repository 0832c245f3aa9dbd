"""Ranks as Ray actors.

Everything that does not import ray stays in `launch`.
"""
