"""The commands `paceline bench …`.

A command parses options, calls `paceline.bench` and prints; measuring belongs there.
"""
