"""Samples: their order, loading them in workers, and fake batches without values.

Order and random streams are functions of (seed, position). Files here know nothing of a plan except the
rank's share of a batch.
"""
