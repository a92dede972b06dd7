"""What the token means of a module count in a batch, before any of it is differentiated."""

from .count import (
    TargetCounts as TargetCounts,
    plain_attributes as plain_attributes,
    run_counting as run_counting,
    summed_counts as summed_counts,
)
from .seen import SeenCounts as SeenCounts

__all__ = ["SeenCounts", "TargetCounts", "plain_attributes", "run_counting", "summed_counts"]
