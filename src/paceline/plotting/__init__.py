"""What all pictures share: figures, colours, paths.

Each picture is drawn in the report of the package that it belongs to.
"""
