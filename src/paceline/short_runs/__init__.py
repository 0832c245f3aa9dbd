"""Short trainings that measure the step time of plans and numbers of ranks."""
