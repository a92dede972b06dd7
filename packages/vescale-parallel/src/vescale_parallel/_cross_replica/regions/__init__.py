"""Code that runs on distributed tensors of the rows of all ranks."""
