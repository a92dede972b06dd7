"""The space of plans that is searched."""
