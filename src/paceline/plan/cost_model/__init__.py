"""Step time, memory and price of a plan on a cluster.

Formulas and constants with their sources; which plans are compared belongs to `plan.search`.
"""
