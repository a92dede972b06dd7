"""Where rows of the batch depend on each other, as in BatchNorm: found, then computed whole."""
