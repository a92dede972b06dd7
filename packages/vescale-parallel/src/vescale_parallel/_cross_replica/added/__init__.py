"""Buffers that rows of a batch add to, as counts: found, and summed over ranks."""
