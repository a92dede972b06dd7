"""Ranks and process groups: one device mesh, and what its ranks must agree on."""
