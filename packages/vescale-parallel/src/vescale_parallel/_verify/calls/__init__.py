"""Calls of a model that are compared with one device: their forms, and flags of modules."""
