"""Data parallelism: equal models, and a part of each batch for every rank."""
