"""The commands of the panel Plan: predicted plans, their communication, and their correctness."""
