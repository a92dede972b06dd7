"""What the command line shows of a checkpoint."""
