"""Tensor parallelism: find which weights split, split them, and exchange activations.

Sharding for data parallelism belongs to `parallel.data_parallel.fsdp`.
"""
