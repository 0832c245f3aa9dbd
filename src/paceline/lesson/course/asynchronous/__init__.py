"""Training in which ranks do not wait for each other in every step."""
