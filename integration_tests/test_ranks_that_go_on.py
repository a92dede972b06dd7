"""Ranks that come to a forward more often than others, and blocks that run again in backward."""

from __future__ import annotations

import re
import warnings
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_dtensor import DTensor
from vescale_testing import World

from .models import build
from .plans import DP, PARTS, PP, TWO, Constraints, make_plan
from .short_group import in_short_group
from .test_bad_input import attempt
from .training import whole

STAGES = ["dp", "zero1", "zero2", "zero3"]
PROMPTS = torch.tensor([[1, 2, 3], [1, 2, 3], [6, 5, 4], [6, 5, 4]])  # two rows a rank
TOKENS = 9


def generated(plan: str, *, is_parallel: bool) -> list[list[int]]:
    """Return the tokens of every row, up to its end."""
    torch.manual_seed(0)
    model: Any = build("llama").model.double()
    whole = model.generate(PROMPTS, max_new_tokens=TOKENS, do_sample=False)[:, 3:]
    end = int(next(token for token in whole[0] if token not in whole[2:]))
    rows = slice(None)
    if is_parallel:
        model = vescale.parallelize(make_plan(TWO[plan]), model)
        rank, count = dist.get_rank(), 4 // TWO[plan][DP]
        rows = slice(rank * count, (rank + 1) * count)
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": end}
    mask = torch.ones_like(PROMPTS[rows])
    found = model.generate(PROMPTS[rows], attention_mask=mask, pad_token_id=0, **options)
    return [_until(row[3:].tolist(), end) for row in found]


def _until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@pytest.mark.by_day("zero1")
@pytest.mark.slow
@pytest.mark.parametrize("plan", STAGES)
def test_ranks_whose_rows_end_earlier_do_not_keep_the_others_waiting(
    world2: World, plan: str
) -> None:
    expected = generated(plan, is_parallel=False)
    lengths = {max(map(len, expected[:2])), max(map(len, expected[2:]))}
    assert len(lengths) == 2
    found = world2.run(_generated, plan, timeout=60.0)
    assert [row for rows in found for row in rows] == expected


def _generated(plan: str) -> list[list[int]]:
    return generated(plan, is_parallel=True)


class Checkpointed(nn.Module):
    """Calls its blocks through ``torch.utils.checkpoint``, as programs of before do."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.embed = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x.square().mean()


def gradients(plan: str, *, use_reentrant: bool, is_parallel: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: nn.Module = Checkpointed(use_reentrant=use_reentrant).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    if is_parallel:
        model = vescale.parallelize(make_plan(TWO[plan]), model)
        x = x.chunk(2)[dist.get_rank()]
    for _ in range(2):
        model(x).backward()
    grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def _gradients(plan: str, use_reentrant: bool) -> dict[str, Tensor]:
    return gradients(plan, use_reentrant=use_reentrant, is_parallel=True)


@pytest.mark.by_day(
    "dp-False", "dp-True", "zero1-False", "zero1-True", "zero2-False", "zero2-True", "zero3-False"
)
@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("plan", STAGES)
def test_blocks_that_a_program_checkpoints_have_one_devices_gradients(
    world2: World, plan: str, use_reentrant: bool
) -> None:
    expected = gradients(plan, use_reentrant=use_reentrant, is_parallel=False)
    for found in world2.run(_gradients, plan, use_reentrant):
        for name, grad in expected.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-12, atol=1e-14)


class InARow(Checkpointed):
    """Calls every block within a checkpoint, or two within one."""

    def __init__(self, *, use_reentrant: bool, of_two: bool = False) -> None:
        super().__init__(use_reentrant=use_reentrant)
        self.of_two = of_two

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        first, second, third = self.blocks
        calls = [lambda x: second(first(x)), third] if self.of_two else self.blocks
        for call in calls:
            given: Any = checkpoint(call, x, use_reentrant=self.use_reentrant)
            x = given
        return x.square().mean()


def trained(*, is_parallel: bool, **options: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: nn.Module = InARow(**options).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    if is_parallel:
        split: Constraints = {
            "pipeline_parallel.split_method": "manual",
            "pipeline_parallel.split_points": ("blocks.1",),
        }
        model = vescale.parallelize(make_plan({PP: 2, PARTS: 2, **split}), model)
    for _ in range(2):
        model(x).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def _stage(use_reentrant: bool, of_two: bool) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        # Of placeholders, which have no gradient.
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad", UserWarning)
        return trained(is_parallel=True, use_reentrant=use_reentrant, of_two=of_two)


@pytest.mark.slow
def test_blocks_of_a_pipeline_run_again_on_what_was_sent(world2: World) -> None:
    expected = trained(is_parallel=False, use_reentrant=False)
    for found in world2.run(_stage, False, False):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.by_day("False-True-'blocks.0', which is on another stage .* around several blocks*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("use_reentrant", "of_two", "message"),
    [
        (True, False, "'blocks.1', the first block of .* with use_reentrant=True"),
        (False, True, "'blocks.0', which is on another stage .* around several blocks"),
    ],
)
def test_checkpoints_that_would_lose_gradients_of_stages_are_refused(
    world2: World, use_reentrant: bool, of_two: bool, message: str
) -> None:
    with TemporaryDirectory() as directory:
        answers = world2.run(in_short_group, directory, attempt, _stage, use_reentrant, of_two)
        world2.close()
    told = [answer[1] for answer in answers if answer is not None and answer[0] is ValueError]
    assert any(re.search(message, each) for each in told), answers
