"""Numeric equivalence: what a plan changes, run whole and on all ranks, and compared."""
