"""Families of models under every schedule: the bits of one device with the same micro-batches.

Targets that count are other numbers in every row. In float32; models with a tied weight, whose
sum over stages is in another order, in float64.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from vescale_parallel import refused_microbatches
from vescale_testing import World

from .plans import Constraints
from .test_pipeline_cuts import compared
from .test_pipeline_schedules import SCHEDULES, constraints_of

pytestmark = pytest.mark.slow

TIED = ("gpt2", "bert")
FAMILIES = (
    "llama", *TIED, "t5", "whisper", "experts", "vit", "llava", "nanogpt", "two_streams",
)  # fmt: skip
BY_DAY = (("bert", "zbv", 4), ("vit", "dualpipev", 8))
CASES = [
    pytest.param(
        *case, id="-".join(map(str, case)), marks=[pytest.mark.nightly] * (case not in BY_DAY)
    )
    for case in (
        (name, schedule, m) for name in FAMILIES for schedule in SCHEDULES for m in (4, 8)
    )
]


def _on_rank(name: str, constraints: Constraints) -> None:
    with warnings.catch_warnings():
        # What cannot be computed in two parts has the same gradients.
        warnings.filterwarnings("ignore", "pipeline_parallel.schedule")
        compared(name, constraints, torch.float64 if name in TIED else torch.float32)


@pytest.mark.parametrize(("name", "schedule", "microbatches"), CASES)
def test_two_ranks_have_the_bits_of_one_device(
    world2: World, name: str, schedule: str, microbatches: int
) -> None:
    world2.run(_on_rank, name, constraints_of(schedule, 2, microbatches))


# DualPipeV has no order of fewer micro-batches than stages.
RUNNING = [
    (schedule, m)
    for schedule, virtual in SCHEDULES.items()
    for m in (4, 8)
    if not refused_microbatches(schedule, size=4, virtual_stages=virtual, microbatches=m)
]


@pytest.mark.nightly
@pytest.mark.parametrize(("schedule", "microbatches"), RUNNING)
@pytest.mark.parametrize("name", FAMILIES)
def test_four_ranks_have_them_too(
    world4: World, name: str, schedule: str, microbatches: int
) -> None:
    world4.run(_on_rank, name, constraints_of(schedule, 4, microbatches))
