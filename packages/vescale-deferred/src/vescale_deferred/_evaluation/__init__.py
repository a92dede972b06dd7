"""From a tape to values: all of a storage, or the part that a shard needs."""
