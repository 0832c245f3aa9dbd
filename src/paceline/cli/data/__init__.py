"""The commands of the panel Data: shards and token files."""
