"""A training state as this rank holds it: its shards, and which keys are wanted."""
