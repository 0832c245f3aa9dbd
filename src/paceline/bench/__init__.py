"""Measurements of a machine, each a table of rows in a JSON file with its schema.

Text and pictures of results are in `bench.report`. Measurements of a training run belong to
`training.profiling`.
"""
