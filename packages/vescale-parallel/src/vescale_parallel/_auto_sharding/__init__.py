"""Proposes shardings: candidates from named axes, grouped, with their collectives placed."""
