"""What each rank of a run is doing, and why the run does not go on."""
