"""Commands that only Paceline itself starts: a rank and the agent of a node.

Commands for users are in `paceline.cli`.
"""
