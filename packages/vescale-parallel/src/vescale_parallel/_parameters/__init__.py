"""A parameter sharded and unsharded, and a model of which only this rank's shards exist."""
