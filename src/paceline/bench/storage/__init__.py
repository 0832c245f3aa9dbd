"""Rates of reading and writing files, and advice on where to put data and checkpoints.

Rates of reading a dataset through loader workers belong to `bench.data_loading`.
"""
