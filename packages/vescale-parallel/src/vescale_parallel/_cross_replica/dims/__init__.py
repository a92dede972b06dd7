"""Which dims of the tensors of a call the rows of the batch are along."""
