"""The built-in tasks, which are also examples.

A task here uses only what any user's task can use.
"""
