"""What benchmarks that run contenders beside each other share."""
