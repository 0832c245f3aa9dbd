"""Pipeline parallelism: cut a model into stages, run their schedule, keep tied weights and buffers equal.

Predictions of schedules belong to `plan.cost_model.schedules`.
"""
