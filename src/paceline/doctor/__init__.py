"""What each rank of a run is doing, and which rank a stalled run waits for.

Reads heartbeats and stacks only; it never stops or changes a run.
"""
