"""Samplers: the values of the next trial, as functions of the journal."""
