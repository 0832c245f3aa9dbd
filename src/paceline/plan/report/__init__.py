"""Text and pictures of plans and predictions.

Nothing here computes a cost.
"""
