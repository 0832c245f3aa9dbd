"""Executors: start trials on ranks, and notice when they end."""
