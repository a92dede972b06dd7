"""Blocks that run again in backward."""
