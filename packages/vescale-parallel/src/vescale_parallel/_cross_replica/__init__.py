"""Where rows of the batch meet (BatchNorm, contrast, masked means): found, then computed whole."""
