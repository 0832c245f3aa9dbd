"""What is predicted of a trial before it starts, and where it trains."""
