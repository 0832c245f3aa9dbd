"""Samples: their order, loading them in workers, and stand-ins without values.

Order and random streams are functions of (seed, position); no file here knows a plan's layout beyond a rank's share of a batch.
"""
