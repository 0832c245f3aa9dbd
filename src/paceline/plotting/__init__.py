"""Shared parts of all pictures: figures, colours, checks of paths.

Each picture itself is drawn by the report of the package to which it belongs.
"""
