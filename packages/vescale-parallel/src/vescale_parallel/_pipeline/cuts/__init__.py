"""Where a pipeline is cut, and which tensors cross a cut."""
