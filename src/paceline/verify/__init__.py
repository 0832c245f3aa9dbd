"""Is it the same training? One process and a plan, held against each other on the user's own model."""
