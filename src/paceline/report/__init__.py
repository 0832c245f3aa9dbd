"""What happened in a run, for people; from its events alone."""
