"""Launchers: start ranks on one machine, several nodes or Ray, restart them, and report why they failed.

What a rank computes belongs to `training`.
"""
