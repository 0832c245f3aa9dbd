"""The version of Paceline, written here alone: pyproject.toml reads it from this file, without importing it."""

__version__ = "0.2.0"
