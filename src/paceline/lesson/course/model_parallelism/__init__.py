"""Models that do not fit on one device, divided over ranks."""
