"""Training with parameter servers: coordinator, server shards, workers and their transport.

Synchronous plans use `training.step` alone.
"""
