"""The lessons. Each file is a lesson: its text, its code, and the values that it shows."""
