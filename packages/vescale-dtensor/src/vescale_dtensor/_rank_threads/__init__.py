"""Ranks that are threads of this process, of which one runs at a time."""
