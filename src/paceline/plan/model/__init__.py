"""Facts of models that the planner needs, from a library or a description.

Facts traced from a user's model come from `training.model_facts`.
"""
