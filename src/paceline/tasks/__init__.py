"""The built-in tasks, which are also examples.

They use only what any task of a user can use.
"""
