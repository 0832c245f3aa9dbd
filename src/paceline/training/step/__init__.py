"""A step: its micro-batches, metrics and updates, and what runs before or after it."""
