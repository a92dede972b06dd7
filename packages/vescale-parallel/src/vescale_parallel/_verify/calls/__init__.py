"""Calls of a model that are compared with one device: their forms, modes and flags."""
