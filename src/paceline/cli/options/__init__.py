"""What several commands share: options and the values that they select, reading a request, and its start."""
