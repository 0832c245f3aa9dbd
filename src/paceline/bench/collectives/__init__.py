"""Bandwidth and latency of collectives, per process group and backend, and the alpha-beta fit.

The volume that a plan sends is computed in `plan.comm_volume`, not here.
"""
