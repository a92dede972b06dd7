"""Forwards on fake tensors: dry runs, what they cost, which random numbers they draw."""
