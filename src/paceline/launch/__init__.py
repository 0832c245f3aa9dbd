"""Starting ranks, and what a rank knows of itself."""
