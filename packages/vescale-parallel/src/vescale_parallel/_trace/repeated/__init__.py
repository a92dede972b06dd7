"""Calls of equal blocks in a run on fake tensors: seen a few times, then repeated."""
