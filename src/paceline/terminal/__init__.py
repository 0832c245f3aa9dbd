"""Runs in a terminal, live: the panels of the page as text."""
