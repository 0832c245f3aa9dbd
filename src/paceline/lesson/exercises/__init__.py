"""Exercises of lessons: what a student gets, a right solution, and the check of a solution."""
