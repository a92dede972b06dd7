"""Attention of slices of a sequence, and what has modules compute it."""
