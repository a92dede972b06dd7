"""Seconds and bytes of candidates: columns of numbers, collectives, then time and memory."""
