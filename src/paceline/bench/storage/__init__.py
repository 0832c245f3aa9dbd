"""Rates of reading and writing files, and advice on where to put data and checkpoints.

Reading a dataset through its workers is measured in `bench.data_loading`.
"""
