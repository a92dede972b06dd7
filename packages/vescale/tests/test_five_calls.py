"""The five calls on one process, which needs no launcher."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_testing import World


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (self.layers(batch["x"]).squeeze(-1) - batch["y"]).pow(2).mean()


def dataset() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(4, generator=generator), "y": torch.randn((), generator=generator)}
        for _ in range(32)
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def _train(path: str, phase: str) -> list[float]:
    torch.manual_seed(0)
    model = vescale.deferred_init(Net)
    plan = vescale.generate_plan(model, {"batch.global_size": 4, "batch.shuffle": True})
    model, optimizer, scheduler, loader = vescale.parallelize(plan, model, sgd, halving, dataset())
    state = {
        "plan": plan, "model": model, "optimizer": optimizer, "lr_scheduler": scheduler,
        "loader": loader,
    }  # fmt: skip
    if phase == "resume":
        assert vescale.load(path, state)["plan"] == plan
    losses: list[float] = []
    for batch in loader:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if phase == "stop" and len(losses) == 3:
            vescale.save(path, state)
            break
    return losses


def _alone() -> list[float]:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)
    scheduler = halving(optimizer)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()
    data = dataset()
    losses: list[float] = []
    for start in range(0, 32, 4):
        rows = [data[i] for i in order[start : start + 4]]
        loss = model({key: torch.stack([row[key] for row in rows]) for key in ("x", "y")})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_and_resuming_is_that_of_torch_alone(world1: World, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    (before,) = world1.run(_train, path, "stop")
    (after,) = world1.run(_train, path, "resume")
    # float32: the norm that clips is accumulated in float64 here.
    assert before + after == pytest.approx(_alone(), rel=1e-6)


def _returned() -> list[int]:
    counts: list[int] = []
    for arguments in (
        (None, None, None),
        (sgd, None, None),
        (sgd, halving, None),
        (None, None, dataset()),
        (sgd, halving, dataset()),
    ):
        plan = vescale.generate_plan(Net(), {"batch.global_size": 4})
        parts = vescale.parallelize(plan, Net(), *arguments)
        counts.append(len(parts) if isinstance(parts, tuple) else 1)
    return counts


def test_one_object_comes_back_for_each_thing_given(world1: World) -> None:
    assert world1.run(_returned) == [[1, 2, 3, 2, 4]]
