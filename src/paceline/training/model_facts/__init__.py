"""Facts of a user's model, traced once: operations, activations, live memory.

The planner's formulas over these facts are in `plan.cost_model`.
"""
