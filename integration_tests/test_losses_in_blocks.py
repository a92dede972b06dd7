"""Losses that blocks compute themselves, where the mode that counts targets is not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import vescale
from vescale_parallel._loss.token_mean import TokenMeans  # noqa: PLC2701 (what it sees is counted)
from vescale_testing import World

from .fake_ranks import IDS, llama, rank_0_of
from .plans import DP, ZERO, Constraints, make_plan
from .training import whole

pytestmark = pytest.mark.slow

STEPS, ROWS, TOKENS, VOCABULARY = 4, 8, 6, 10


class Helper(nn.Module):
    """Holds the loss, without parameters."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.CrossEntropyLoss(ignore_index=0)(x.flatten(0, 1), targets.flatten().clamp(min=0))


class Block(nn.Module):
    """Returns an auxiliary loss beside its activation; later in training another one."""

    is_late = False

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, VOCABULARY)
        self.helper = Helper()

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.linear(x).tanh()
        logits = self.head(x)
        if self.is_late:
            return x, self.helper(logits, targets)
        return x, cross_entropy(logits.flatten(0, 1), targets.flatten())


class Checkpointed(Block):
    """Runs its own part again in backward, the loss apart from it."""

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = checkpoint(lambda x: x + self.linear(x).tanh(), x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return x, F.nll_loss(self.head(x).log_softmax(-1).flatten(0, 1), targets.flatten())


class Net(nn.Module):
    def __init__(self, block: type[Block]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x, losses = self.embedding(ids), list[Tensor]()
        for block in self.blocks:
            x, loss = block(x, targets)
            losses.append(loss)
        return 0.5 * sum(losses[:-1]) + losses[-1]


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(STEPS):
        ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS))
        targets = ids.roll(-1, 1)
        # Rows count different numbers of targets.
        targets[torch.arange(TOKENS)[None] > torch.arange(ROWS)[:, None]] = -100
        found.append((ids, targets.masked_fill(ids == 3, 0)))
    return found


def trained(block: type[Block], constraints: Constraints | None, twice: bool) -> list[Tensor]:
    """Return the losses, and the parameters afterwards."""
    torch.manual_seed(0)
    model: Any = Net(block).double()
    rank, parts = 0, 1
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
        rank, parts = torch.distributed.get_rank(), constraints.get(DP, 1)
    # Its blocks hold parameters and compute losses.
    warnings.filterwarnings("ignore", "the targets of the batch could not be counted")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Tensor] = []
    for step, (ids, targets) in enumerate(batches()):
        for each in model.blocks:
            each.is_late = step > 1
        losses.append(model(ids.chunk(parts)[rank % parts], targets.chunk(parts)[rank % parts]))
        losses[-1].backward(retain_graph=twice)
        if twice:
            losses[-1].backward()  # blocks run again once more
        optimizer.step()
        optimizer.zero_grad()
    return [*map(Tensor.detach, losses), *(whole(p).detach() for p in model.parameters())]


@pytest.mark.by_day("constraints1-Block")
@pytest.mark.parametrize("block", [Block, Checkpointed])
@pytest.mark.parametrize(
    "constraints",
    [
        {DP: 2, ZERO: 0},
        {DP: 2, ZERO: 3},
        {DP: 2, ZERO: 3, "recompute": "full"},
        {DP: 2, "batch.gradient_accumulation": 2},
    ],
)
def test_losses_that_blocks_compute_are_those_of_one_device(
    world2: World, block: type[Block], constraints: Constraints
) -> None:
    twice = "batch.gradient_accumulation" not in constraints
    expected = trained(block, None, twice)
    for found in world2.run(trained, block, constraints, twice):
        for x, y in zip(found, expected, strict=True):
            # A few sums of a dozen float64 terms in another order, over four steps.
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def test_functions_that_the_mode_sees_do_not_depend_on_the_number_of_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    see = TokenMeans.__torch_function__

    def noted(self: TokenMeans, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(func)
        return see(self, func, types, args, kwargs)

    monkeypatch.setattr(TokenMeans, "__torch_function__", noted)
    found: list[int] = []
    for layers in (2, 4):
        with rank_0_of(2):
            model = llama(layers)
            model = vescale.parallelize(make_plan({DP: 2, ZERO: 3}), model)
            model(input_ids=IDS, labels=IDS)
            seen.clear()
            model(input_ids=IDS, labels=IDS)
        found.append(len(seen))
        assert seen.count(F.cross_entropy) == 1
    # Embedding, mask and positions, last norm, head and loss; a layer calls 57.
    assert found[0] == found[1] <= 57
