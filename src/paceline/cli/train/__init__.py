"""The commands of the panel Train: a training, its continuation, and what follows from its checkpoints."""
