"""The loss of one device from shards of its batch."""
