"""Finds silently corrupted weights: digests, their comparison between ranks, and losses computed twice."""
