"""What the token means of a module count in a batch, before any of it is differentiated."""

from .count import (
    Form as Form,
    TargetCounts as TargetCounts,
    check_known as check_known,
    is_known as is_known,
    plain_attributes as plain_attributes,
    run_counting as run_counting,
    summed_counts as summed_counts,
)
from .seen import SeenCounts as SeenCounts

__all__ = [
    "Form",
    "SeenCounts",
    "TargetCounts",
    "check_known",
    "is_known",
    "plain_attributes",
    "run_counting",
    "summed_counts",
]
