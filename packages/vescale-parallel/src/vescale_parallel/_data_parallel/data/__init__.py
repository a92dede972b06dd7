"""Data sets and loaders of every kind, read in one device's order: each rank gets its rows."""
