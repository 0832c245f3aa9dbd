"""Levels of memory and network of this machine: bandwidth and latency of each, in one table."""
