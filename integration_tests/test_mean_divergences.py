"""Students whose forward returns the divergence from a teacher, in micro-batches."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, Constraints
from .programs import PIPELINE, WIDTH, Block, Run, right

pytestmark = pytest.mark.slow


class Student(nn.Module):
    """Is to say what a frozen layer says, at some temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)
        self.teacher = nn.Linear(WIDTH, 5).requires_grad_(False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        x, y = batch["x"], batch["y"]
        for block in self.blocks:
            x = block(x)
        said, heard = self.head(x) / 3, self.teacher(y) / 3
        return 9 * F.kl_div(said.log_softmax(-1), heard.softmax(-1), reduction="batchmean")


def student(run: Run) -> None:
    run.train(Student())


@pytest.mark.parametrize("plan", [PIPELINE, {DP: 2, "batch.gradient_accumulation": 2}])
def test_a_divergence_divided_by_rows_is_taken_in_micro_batches(
    world2: World, plan: Constraints
) -> None:
    right(world2, student, plan)
