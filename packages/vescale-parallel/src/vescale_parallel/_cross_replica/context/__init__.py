"""Context parallelism: ranks that share a sequence hold slices of it, and attend to all of it."""
