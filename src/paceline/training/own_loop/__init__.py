"""`paceline.setup`: a model and its optimizer, distributed for a training loop that the user writes."""
