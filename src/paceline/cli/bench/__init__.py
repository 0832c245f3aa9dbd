"""The bench commands: one file for the whole bench, one for single benches, one for collectives.

A command parses, calls and prints; measuring belongs to `paceline.bench`.
"""
