"""The commands of the panel Learn."""
