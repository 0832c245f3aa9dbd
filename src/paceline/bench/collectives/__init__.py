"""Bandwidth and latency of collectives, per process group and back end, and the alpha-beta fit.

The communication volume of a plan belongs to `plan.comm_volume`.
"""
