"""The loss of a batch: the forward pass of a task, losses by name, and losses of the whole global batch."""
