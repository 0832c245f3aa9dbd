"""Traces of a few steps: what each rank does when, as files for Perfetto."""
