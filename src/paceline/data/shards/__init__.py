"""Many small files in few tar shards with an index: pack, read and restore them."""
