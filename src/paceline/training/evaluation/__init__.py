"""Evaluation: metrics over a split, and what a checkpoint scores, predicts or writes."""
