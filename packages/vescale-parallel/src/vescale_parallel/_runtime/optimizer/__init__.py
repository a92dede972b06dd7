"""A step of any torch optimizer: on this rank's shards, or on whole parameters by owners."""
