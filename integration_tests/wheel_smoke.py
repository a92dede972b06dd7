"""Import every package and take a tiny model through training, saving and loading, on one rank.

``nox -s wheels`` runs it where only the built wheels are installed.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

PACKAGES = (
    "vescale",
    "vescale_ckpt",
    "vescale_deferred",
    "vescale_dtensor",
    "vescale_parallel",
    "vescale_planner",
)


class Net(nn.Module):
    """The smallest thing with repeated blocks and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs).tanh()
        return F.mse_loss(inputs, targets)


def build(seed: int) -> tuple[object, nn.Module, torch.optim.Optimizer]:
    """Return the plan, a model of its own random numbers, and its optimizer."""
    import vescale

    torch.manual_seed(seed)
    model = vescale.deferred_init(Net)
    plan = vescale.generate_plan(model, {})
    model, optimizer = vescale.parallelize(
        plan, model, lambda model: torch.optim.AdamW(model.parameters())
    )
    return plan, model, optimizer


def main() -> None:
    """Load what was saved into a model that started elsewhere: their losses are the same bits."""
    import vescale

    for name in PACKAGES:
        package = importlib.import_module(name)
        assert package.__version__, name
        assert (Path(str(package.__file__)).parent / "py.typed").exists(), name

    inputs, targets = torch.ones(4, 8), torch.zeros(4, 8)
    plan, model, optimizer = build(seed=0)
    model(inputs, targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    _, other, other_optimizer = build(seed=1)
    assert not torch.equal(other(inputs, targets), model(inputs, targets))
    with tempfile.TemporaryDirectory() as directory:
        vescale.save(directory, {"plan": plan, "model": model, "optimizer": optimizer})
        vescale.load(directory, {"plan": plan, "model": other, "optimizer": other_optimizer})
    assert torch.equal(other(inputs, targets), model(inputs, targets))
    print("the wheels work:", ", ".join(PACKAGES))


if __name__ == "__main__":
    main()
