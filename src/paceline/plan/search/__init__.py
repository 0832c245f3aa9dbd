"""Candidates, the best plans among them, and how they scale with the number of ranks.

The cost of one plan belongs to `plan.cost_model`.
"""
