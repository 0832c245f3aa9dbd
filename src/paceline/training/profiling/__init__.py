"""Where time and memory of a training go: profiler, time breakdown, peak memory.

Text of the results belongs to `report.breakdown`.
"""
