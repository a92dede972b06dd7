"""Two steps of a small language model in float64, under a plan and on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .families import VOCABULARY, InDouble, tokens
from .plans import Constraints
from .training import whole

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32,
}  # fmt: skip
Build = Callable[[str], nn.Module]


class LanguageModel(nn.Module):
    """Blocks of one's own between an embedding of width 32 and a head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def train(
    build: Build, name: str, constraints: Constraints | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses of two steps, and gradients of the first one."""
    model: Any = build(name)
    batch = tokens() | {"labels": tokens()["input_ids"]}  # as many count in every row
    part, parts = 0, 1
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if constraints is not None:
        world_size = torch.distributed.get_world_size()
        plan = vescale.generate_plan(
            model, constraints, world_size=world_size, example_batch=batch
        )
        model, optimizer = vescale.parallelize(
            plan, model, lambda each: torch.optim.SGD(each.parameters(), lr=0.1)
        )
        part, parts = vescale.data_parallel_rank(model), plan.data_parallel.size
    rows = {name: each.chunk(parts)[part] for name, each in batch.items()}
    losses, grads = list[float](), dict[str, Tensor]()
    for _ in range(2):
        with InDouble():
            output = model(**rows)
            loss = output if isinstance(output, Tensor) else output.loss
            loss.backward()
        grads = grads or {
            name: whole(each.grad).clone()
            for name, each in model.named_parameters()
            if each.grad is not None
        }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, grads


@cache
def on_one_device(build: Build, name: str) -> tuple[list[float], dict[str, Tensor]]:
    return train(build, name, None)


def compare(world: World, build: Build, name: str, constraints: Constraints) -> None:
    """Compare losses and gradients with one device's, within float64's rounding."""
    losses, grads = on_one_device(build, name)
    runs = world.run(train, build, name, constraints)
    # Sums over ranks, and over stages' micro-batches, are in another order than on one device.
    mean = [sum(each) / len(runs) for each in zip(*(found for found, _ in runs), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-12)
    for _, found in runs:
        for parameter, grad in found.items():  # of a pipeline's rank those of its stage
            scale = float(grads[parameter].abs().max())
            torch.testing.assert_close(
                grad, grads[parameter], rtol=0, atol=1e-12 * (scale + 1e-3), msg=parameter
            )
    assert {parameter for _, found in runs for parameter in found} == grads.keys()


Named = Callable[[tuple[str, ...]], nn.Module]


def gradients(
    build: Named, names: tuple[str, ...], batch: Tensor, constraints: Constraints | None
) -> dict[str, Tensor]:
    """Return the gradients of a model that returns its loss for a batch."""
    model: Any = build(names)
    if constraints is not None:
        world_size = torch.distributed.get_world_size()
        plan = vescale.generate_plan(
            model, constraints, world_size=world_size, example_batch=batch
        )
        model = vescale.parallelize(plan, model)
    model(batch).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def compare_gradients(
    world: World, build: Named, names: tuple[str, ...], batch: Tensor, constraints: Constraints
) -> None:
    """Compare gradients with one device's, within float64's rounding."""
    expected = gradients(build, names, batch, None)
    for found in world.run(gradients, build, names, batch, constraints):
        assert found.keys() == expected.keys()
        for name, grad in found.items():  # sums over ranks are in another order
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-14, msg=name)
