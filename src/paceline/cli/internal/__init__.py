"""Commands that only Paceline starts: a rank and the agent of a node.

Commands for users are in `paceline.cli`.
"""
