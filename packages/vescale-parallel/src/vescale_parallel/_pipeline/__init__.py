"""Pipelines without a graph: stages, schedules, point-to-point transfers, tied weights."""
