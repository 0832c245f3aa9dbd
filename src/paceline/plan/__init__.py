"""Plans: the layout of a training over ranks, their cost and the search for the best.

Nothing here imports torch or touches a model; facts of models come from `training.model_facts`.
"""
