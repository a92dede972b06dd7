"""Expert parallelism: ranks that share a batch have experts of their own, and send them tokens."""
