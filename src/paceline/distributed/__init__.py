"""State of one rank: its world, network interface, stores, process groups, device meshes, random streams.

Nothing here knows a model or a task.
"""
