"""Training scripts of public repositories under plans, next to themselves on one device."""
