"""Text and pictures of bench results.

Nothing here measures; it reads `bench.result.Result` only and does not import torch.
"""
