"""Context parallelism: split the sequence of activations over ranks, with ring attention.

Splitting the sequence between tensor-parallel layers belongs to `parallel.tensor`.
"""
