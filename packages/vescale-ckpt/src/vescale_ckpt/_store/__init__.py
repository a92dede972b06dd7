"""Committed checkpoints: appear whole, are read and checked, are listed and deleted."""
