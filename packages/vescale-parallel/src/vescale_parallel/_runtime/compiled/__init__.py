"""Blocks that are compiled: graphs of each, and what of forward no graph has."""
