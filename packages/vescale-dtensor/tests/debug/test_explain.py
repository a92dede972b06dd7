"""What explain() says, against what is known of a tensor-parallel MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_dtensor import CommCounter, distribute_tensor, emulate, explain


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def _tensor_parallel_mlp() -> tuple[MLP, Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = MLP()
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight.detach(), mesh, (Shard(0),)))
    model.down.weight = nn.Parameter(
        distribute_tensor(model.down.weight.detach(), mesh, (Shard(1),))
    )
    return model, distribute_tensor(torch.randn(4, 8), mesh, (Replicate(),))


def test_every_operator_is_told_with_its_layouts_and_line() -> None:
    with emulate(2), explain() as explanation:
        model, x = _tensor_parallel_mlp()
        with torch.no_grad():
            result = model(x)
        products = [each for each in explanation.operations if "mm" in each.name]
        assert [each.outputs[0].placements for each in products] == [(Shard(1),), (Partial(),)]
        assert products[0].local_shapes == ((4, 8),)
        assert products[0].source.startswith("test_explain.py:")
        assert explanation.nbytes == 0
        _ = result + 1
        (move,) = explanation.operations[-1].moves
        assert move.source.placements == (Partial(),)
        assert move.target.placements == (Replicate(),)


def test_bytes_are_those_that_were_sent_and_add_up_over_modules() -> None:
    with emulate(2), explain(model := MLP()) as explanation:
        made, x = _tensor_parallel_mlp()
        model.up.weight, model.down.weight = made.up.weight, made.down.weight
        with CommCounter() as counter:
            model(x).sum().backward()
        totals = explanation.by_module()
        assert explanation.nbytes == counter.nbytes
        assert totals[""][2] == counter.nbytes
        assert set(totals) == {"", "up", "down"}
        text = str(explanation)
    assert "aten.mm.default" in text
    assert "(S(0))" in text


def test_nothing_is_told_afterwards() -> None:
    with emulate(2):
        with explain() as explanation:
            _, x = _tensor_parallel_mlp()
        before = len(explanation.operations)
        _ = x + 1
        assert len(explanation.operations) == before
