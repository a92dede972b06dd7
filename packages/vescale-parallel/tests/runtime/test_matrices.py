"""Parameters that are several matrices are updated as if these were parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

from vescale_dtensor import DTensor, distribute_tensor
from vescale_parallel import (
    ParallelPlan,
    declare_matrices,
    declare_optimizer,
    parallelize,
    with_constraints,
)

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
HEADS = 5
SPLIT = {"q_proj.weight": (HEADS, 0), "o_proj.weight": (HEADS, 1), "gate.weight": (1, 0)}


class Attention(nn.Module):
    """Has projections whose heads are in rows and in columns, and experts in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(7, HEADS * 3, bias=False)
        self.o_proj = nn.Linear(HEADS * 3, 7, bias=False)
        self.gate = nn.Linear(7, 4, bias=False)


class Assigning(Optimizer):
    """Divides by a norm, assigns what comes out, and takes parameters of any number of dims."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as users write it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    sums = self.state[p].setdefault("sums", torch.zeros(p.shape[:-1]).to(p))
                    sums += p.grad.square().sum(-1)
                    p.data = p - group["lr"] * p.grad / sums.sum().sqrt()


MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "Muon": lambda params: Muon(params, lr=0.1),
    "Assigning": Assigning,
}


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def expected(name: str, steps: int) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return the parameters, and the states of matrices, of one device with a parameter each."""
    model = Attention()
    matrices = [
        nn.Parameter(part)
        for fqn, p in model.named_parameters()
        for part in p.detach().chunk(*SPLIT[fqn])
    ]
    optimizer = MAKE[name](matrices)
    for step in range(steps):
        parts = [
            part
            for (fqn, _), grad in zip(
                model.named_parameters(), gradients(model, step), strict=True
            )
            for part in grad.chunk(*SPLIT[fqn])
        ]
        for matrix, part in zip(matrices, parts, strict=True):
            matrix.grad = part
        optimizer.step()
    whole: list[Tensor] = []
    for fqn in SPLIT:
        count, dim = SPLIT[fqn]
        whole.append(torch.cat([*matrices[:count]], dim).detach())
        matrices = matrices[count:]
    return whole, list(optimizer.state.values())


def take(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for p, grad in zip(model.parameters(), gradients(model, step), strict=True):
            held: Any = p
            p.grad = distribute_tensor(grad, held.device_mesh, held.placements)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()


def parallel(model: nn.Module, size: int, stage: int, name: str) -> tuple[Any, Any]:
    declare_optimizer(Assigning, updates="parameters")
    declare_matrices(model, "q_*.weight", count=HEADS)
    declare_matrices(model, "o_proj.weight", count=HEADS, dim=1)
    constraints = {"data_parallel.size": size, "data_parallel.zero_stage": stage}
    return parallelize(
        with_constraints(ParallelPlan(), constraints), model, lambda m: MAKE[name](m.parameters())
    )


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 0), (2, 1), (3, 3)])
def test_every_matrix_is_updated_as_a_parameter_of_one_device(
    in_threads: InThreads, name: str, size: int, stage: int
) -> None:
    values, states = expected(name, 3)
    models = [Attention() for _ in range(size)]  # seeds are those of all threads

    def on_rank(rank: int) -> Any:
        model, optimizer = parallel(models[rank], size, stage, name)
        take(model, optimizer, range(3))
        state = whole(optimizer.state_dict()["state"])
        return [p.detach().full_tensor() for p in model.parameters()], state

    for found, state in in_threads(size, on_rank):
        assert all(torch.equal(x, y) for x, y in zip(found, values, strict=True))
        matrices = [
            state[fqn][str(index)] if count > 1 else state[fqn]
            for fqn, (count, _) in SPLIT.items()
            for index in range(count)
        ]
        for own, other in zip(matrices, states, strict=True):
            assert own.keys() == other.keys()
            assert all(torch.equal(own[key], other[key]) for key in own)


def test_the_state_of_matrices_goes_on_under_another_plan(in_threads: InThreads) -> None:
    values, _ = expected("Muon", 3)
    models = [Attention() for _ in range(5)]

    def first(rank: int) -> Any:
        model, optimizer = parallel(models[rank], 2, 1, "Muon")
        take(model, optimizer, range(2))
        saved = optimizer.state_dict()
        weights = {fqn: p.detach().full_tensor() for fqn, p in model.named_parameters()}
        return weights, {**saved, "state": whole(saved["state"])}

    weights, saved = in_threads(2, first)[0]

    def then(rank: int) -> Any:
        model, optimizer = parallel(models[2 + rank], 3, 3, "Muon")
        for fqn, p in model.named_parameters():
            with torch.no_grad():
                p.copy_(distribute_tensor(weights[fqn], p.device_mesh, p.placements))
        optimizer.load_state_dict(saved)
        take(model, optimizer, range(2, 3))
        return [p.detach().full_tensor() for p in model.parameters()]

    for found in in_threads(3, then):
        assert all(torch.equal(x, y) for x, y in zip(found, values, strict=True))


@pytest.mark.parametrize(
    ("name", "count", "dim", "message"),
    [
        ("k_proj.weight", 5, 0, "expected the name of a parameter of Attention, such as 'q_proj"),
        (
            "q_proj.weight",
            4,
            0,
            r"divide dim 0 of 'q_proj.weight', of shape \(15, 7\), into equal",
        ),
        ("q_proj.weight", 5, 2, r"divide dim 2 of 'q_proj.weight'"),
        ("q_proj.weight", 0, 0, r"got 0; pad the parameter"),
    ],
)
def test_what_cannot_be_several_matrices_is_refused(
    name: str, count: int, dim: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        declare_matrices(Attention(), name, count=count, dim=dim)


def test_an_optimizer_of_which_nothing_is_known_does_not_ignore_matrices(
    in_threads: InThreads,
) -> None:
    class Unknown(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise AssertionError

    models = [Attention() for _ in range(2)]

    def on_rank(rank: int) -> None:
        model = models[rank]
        declare_matrices(model, "q_proj.weight", count=HEADS)
        plan = with_constraints(ParallelPlan(), {"data_parallel.size": 2})
        with pytest.raises(
            ValueError, match=r"Unknown\.step is not known .*'q_proj.weight' is declared"
        ):
            parallelize(plan, model, lambda m: Unknown(m.parameters(), lr=0.1))

    in_threads(2, on_rank)
