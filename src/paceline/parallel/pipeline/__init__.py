"""Pipeline parallelism: divide a model into stages, run their schedule, sync tied weights and buffers.

Predicted times of schedules belong to `plan.schedules`.
"""
