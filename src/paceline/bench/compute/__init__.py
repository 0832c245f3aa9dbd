"""Rates of kernels, operations and whole steps, and their overlap with communication.

Predictions from these rates belong to `plan.cost_model`.
"""
