"""Ranks started through Ray actors.

Modules that do not import ray stay in `launch`.
"""
