"""Plans for a task, found from the facts of its model."""
