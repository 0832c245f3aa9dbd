"""The built-in optimizers that torch does not have, or not for sharded weights."""
