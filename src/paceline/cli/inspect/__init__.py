"""The commands of the panel Inspect: what happened in a run, and why it is slow."""
