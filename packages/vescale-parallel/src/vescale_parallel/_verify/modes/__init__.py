"""Modes in which forwards run that are compared."""
