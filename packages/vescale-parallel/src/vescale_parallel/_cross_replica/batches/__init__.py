"""The small batches that checks run a model on: some rows, or graphs beside others."""
