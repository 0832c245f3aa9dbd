"""Why training is distributed: models that grew, and machines whose memory is a hierarchy."""
