"""Steps on stand-ins without memory: communication volume, checkpoint size, stages of large plans.

No process group with peers is needed here.
"""
