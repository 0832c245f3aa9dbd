"""What happened in a run, for people: its view, progress, summary and breakdown.

Reads the files of a run only; it needs neither torch nor a live run.
"""
