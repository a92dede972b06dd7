"""Train under a plan, beside one device that runs the same micro-batches: equal to the bit.

The one device runs every rank's rows on their own and adds their gradients up in the order of
ranks: over the shards of a copy first, over copies then.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import vescale
from vescale_parallel import ParallelPlan, with_constraints

from .families import CONFIGS, VOCABULARY, hugging_face
from .training import whole

ROWS, LENGTH = 2, 8  # of a rank's micro-batch
OptimizerFn = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module) -> Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return AdamW(trained, lr=1e-2, weight_decay=0.1)


class Convolutions(nn.Module):
    """Odd widths, weights of four dims or of five, norms of one, a head."""

    def __init__(self, convolution: type[nn.Conv2d | nn.Conv3d] = nn.Conv2d) -> None:
        super().__init__()
        self.stem = convolution(3, 10, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(convolution(10, 10, 3, padding=1), nn.GroupNorm(2, 10), nn.GELU())
            for _ in range(2)
        )
        self.head = nn.Linear(10, 7)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.stem(pixels)  # (rows, channels, ...)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.flatten(2).mean(2))


CONVOLUTIONS: dict[str, type[nn.Conv2d | nn.Conv3d]] = {"conv": nn.Conv2d, "conv3d": nn.Conv3d}


def build(name: str) -> nn.Module:
    """Return a tiny model in float32, the same each time."""
    torch.manual_seed(3)
    if name in CONVOLUTIONS:
        return Convolutions(CONVOLUTIONS[name])
    return hugging_face(name, "sdpa", **CONFIGS[name])


def batch_of(name: str, step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of a global batch."""
    generator = torch.Generator().manual_seed(step)
    if name in CONVOLUTIONS:
        space = (6, 6) if name == "conv" else (4, 4, 4)
        pixels = torch.randn(rows, 3, *space, generator=generator)
        return pixels, torch.randint(0, 7, (rows,), generator=generator)
    most = min(VOCABULARY, CONFIGS[name]["vocab_size"])
    ids_BS = torch.randint(0, most, (rows, LENGTH), generator=generator)
    return ids_BS, ids_BS.roll(-1, 1)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of some rows, computed by the loop."""
    with warnings.catch_warnings():
        # As many targets count on every rank.
        warnings.filterwarnings("ignore", "the module returned no scalar loss")
        found = model(inputs)
    logits = getattr(found, "logits", found)
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def sum_in_order(model: nn.Module, parts: list[tuple[Tensor, Tensor]], copies: int) -> None:
    """Add to the gradients of one device their mean over the rows of all ranks."""
    before = [p.grad for p in model.parameters()]
    found: list[list[Tensor | None]] = []
    for inputs, targets in parts:
        model.zero_grad()
        loss_of(model, inputs, targets).backward()
        found.append([p.grad for p in model.parameters()])
    for parameter, earlier, of_ranks in zip(
        model.parameters(), before, zip(*found, strict=True), strict=True
    ):
        grads = [grad for grad in of_ranks if grad is not None]
        mean = _mean(grads, copies) if grads else None
        both = [grad for grad in (earlier, mean) if grad is not None]
        parameter.grad = _added_up(both) if both else None


def _mean(grads: list[Tensor], copies: int) -> Tensor:
    shards = len(grads) // copies
    sums = [_added_up(grads[at : at + shards]) for at in range(0, len(grads), shards)]
    return _added_up(sums) / len(grads)


def _added_up(tensors: list[Tensor]) -> Tensor:
    return functools.reduce(lambda total, each: total + each, tensors)


def train_beside(
    name: str,
    constraints: dict[str, Any],
    *,
    optimizer_fn: OptimizerFn = adamw,
    change: Callable[[nn.Module], object] = lambda model: None,
    steps: int = 10,
    passes: int = 1,
    evaluates: bool = False,
) -> Any:
    """Compare the parameters of all steps; return the model, as it is then.

    Args:
        name: The model.
        constraints: The plan.
        optimizer_fn: Makes the optimizer of both.
        change: What is done to the model first.
        steps: Of the optimizer.
        passes: Backward passes before each.
        evaluates: Whether to evaluate without gradients before each, and compare the outputs.
    """
    alone, given = build(name), build(name)
    change(alone)
    change(given)
    alone = copy.deepcopy(alone)  # no memory of the other
    plan = with_constraints(ParallelPlan(), constraints)
    model, optimizer = vescale.parallelize(plan, given, optimizer_fn)
    expected = optimizer_fn(alone)
    data = plan.data_parallel
    ranks, rank = data.size, vescale.data_parallel_rank(model)
    copies = data.replicate_size if data.zero_stage else 1
    for step in range(steps):
        for index in range(passes):
            inputs, targets = batch_of(name, passes * step + index, ROWS * ranks)
            parts = list(zip(inputs.chunk(ranks), targets.chunk(ranks), strict=True))
            if evaluates:
                with torch.no_grad():
                    found, other = model(parts[rank][0]), alone(parts[rank][0])
                assert torch.equal(
                    getattr(found, "logits", found), getattr(other, "logits", other)
                )
            loss_of(model, *parts[rank]).backward()
            sum_in_order(alone, parts, copies)
        for each in (optimizer, expected):
            each.step()
            each.zero_grad()
    for (fqn, parameter), own in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(whole(own), parameter), fqn
    return model
