"""Slurm: job scripts as pure functions, the site file, and a client of its commands.

What runs inside a job once ranks are started belongs to `launch`.
"""
