"""The version of Paceline. pyproject.toml reads it from this file without importing it."""

__version__ = "0.2.0"
