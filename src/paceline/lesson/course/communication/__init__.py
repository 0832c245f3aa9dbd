"""Processes, and messages between them."""
