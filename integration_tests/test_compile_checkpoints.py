"""Compiled blocks that the program repeats in backward, by torch.utils.checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_parallel import compile_report
from vescale_testing import World

from .compiled_training import train_steps
from .plans import PARTS, PP, TP, Constraints, make_plan

COMPILED: Constraints = {"compile": "blocks", "compile_backend": "aot_eager"}
PLANS: dict[str, Constraints] = {"pp": {PP: 2, PARTS: 2}, "tp": {TP: 2}}
WIDTH, ROWS = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))) ** 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x).square().mean()


def trained(constraints: Constraints | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model: nn.Module = Net().double()
    batches = [{"x": torch.randn(ROWS, n, WIDTH, dtype=torch.float64)} for n in (6, 6, 9, 4)]
    if constraints is None:
        return train_steps(model, batches, is_compiled=False)[0]
    if TP in constraints:
        given = {**constraints, "recompute": "none"}
        plan = vescale.generate_plan(model, given, cluster="cpu", example_batch=batches[0])
    else:
        plan = make_plan(constraints)
    model = vescale.parallelize(plan, model)
    found, _ = train_steps(model, batches, is_compiled=True)
    report = compile_report(model).values()
    assert any(block.num_graphs for block in report)
    assert not any(block.eager for block in report), report
    return found


@pytest.mark.by_day("pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_blocks_run_again_in_backward_as_they_ran_first(world2: World, plan: str) -> None:
    expected = trained(None)
    for found in world2.run(trained, {**PLANS[plan], **COMPILED}, timeout=300):
        assert found.keys() == expected.keys()
        for name, x in found.items():
            # float64; ranks add up in another order.
            atol = 1e-10 * float(expected[name].abs().max())
            torch.testing.assert_close(x, expected[name], rtol=0, atol=atol, msg=name)
