"""Text and pictures of bench results.

These modules only read `bench.result.Result`. They measure nothing and do not import torch.
"""
