"""From gradients to weights: the optimizer, clipping, schedules of learning rate and batch."""
