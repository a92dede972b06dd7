"""What was recorded: deferred tensors, and the tape of writes to each of their storages."""
