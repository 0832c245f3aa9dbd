"""How to lay a training out over ranks."""
