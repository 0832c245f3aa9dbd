"""Rates of kernels, operations, whole steps and their overlap with communication.

What these rates predict for a plan belongs to `plan.cost_model`.
"""
