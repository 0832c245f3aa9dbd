"""paceline tune: its options, the study that they define, and its start."""
