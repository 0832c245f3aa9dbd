"""Facts of models that the planner needs: parameters, operations, activations, from a library or a
description.

Facts traced from a user's model come from `training.model_facts`.
"""
