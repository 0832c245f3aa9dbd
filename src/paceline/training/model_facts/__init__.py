"""Facts of a user's model, traced in one pass: operations, activations, live memory.

The planner's formulas over these facts are in `plan.cost_model`.
"""
