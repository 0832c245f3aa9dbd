"""What the machines are."""
