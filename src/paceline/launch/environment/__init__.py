"""This Python environment on other machines: as wheels for nodes without a network, and as an image."""
