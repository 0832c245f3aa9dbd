"""Measurements of a machine, each a table of rows in a JSON file with its schema.

Text and pictures of results are in `bench.report`; what is measured of a training run belongs to `training.profiling`.
"""
