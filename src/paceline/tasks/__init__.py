"""The built-in tasks, which are also the examples."""
