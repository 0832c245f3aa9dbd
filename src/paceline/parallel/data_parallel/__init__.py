"""Data parallelism: replicate or shard a model, and combine what ranks change in its buffers."""
