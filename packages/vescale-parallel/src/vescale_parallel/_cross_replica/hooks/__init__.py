"""Hooks that are code of what a model computes: which, and what they keep for other modules."""
