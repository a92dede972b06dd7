"""Which lists of modules are experts, and what is proven of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_parallel._expert_parallel.find import find_experts
from vescale_parallel._expert_parallel.find_listed import find_listed
from vescale_parallel._expert_parallel.listed import (
    ListedExperts,
    first_pass,
    num_on_ranks,
    rank_of,
)


class Layer(nn.Module):
    """Four experts in a list; every token goes to two of them."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(6, experts)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(experts))
        self.shared = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            row, slot = torch.where(chosen == index)
            out[row] += self.made(expert, flat[row]) * weights[row, slot, None]
        return (out + self.shared(flat)).view_as(x)

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows)


class Normalized(nn.Linear):
    """What it makes of a row depends on its other rows."""

    def forward(self, input: Tensor) -> Tensor:
        made = super().forward(input)
        return made - made.mean(0)


class OfNormalized(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Normalized(6, 6) for _ in range(4))


class Chain(Layer):
    """Every module has what the one before it made: layers, not experts."""

    def forward(self, x: Tensor) -> Tensor:
        for expert in self.experts:
            x = x + expert(x).tanh() * self.router(x).softmax(-1)[..., :1]
        return x


class Parts(Layer):
    """Takes the weight of an expert without calling it."""

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        assert isinstance(expert.weight, Tensor)
        return rows @ expert.weight.T


class Noisy(Layer):
    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows + torch.rand_like(rows) if self.training else rows)


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return expert(rows)


class Keeping(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.losses = list[Tensor]()

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        self.losses.append(rows.mean())
        return expert(rows)


class Totalling(Layer):
    """Adds up in attributes that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.total: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + self.router(x).logsumexp(-1).square().mean()
        return super().forward(x)


class Numbering(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class OfCounting(Layer):
    """Its experts count their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(CountingLinear(6, 6) for _ in range(4))


class CountingLinear(nn.Linear):
    def __init__(self, width: int, made: int) -> None:
        super().__init__(width, made)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, input: Tensor) -> Tensor:
        self.get_buffer("calls").add_(1)
        return super().forward(input)


class Guessing(Layer):
    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows) * (0.5 if self.training and random.random() < 0.5 else 1.0)


class Dropping(Layer):
    def __init__(self) -> None:
        super().__init__()
        dropping = (nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(4))
        self.experts = nn.ModuleList(dropping)


LOSSES = list[Tensor]()


class Handing(Layer):
    """Appends to a list of the module that it is written in."""

    def forward(self, x: Tensor) -> Tensor:
        LOSSES.append(self.router(x).logsumexp(-1).square().mean())
        return super().forward(x)


LOADS = list[float]()
STATISTICS = {"tokens": 0}


class Logging(Layer):
    """Appends numbers to a list of the module that it is written in."""

    def forward(self, x: Tensor) -> Tensor:
        LOADS.append(self.router(x).logsumexp(-1).mean().item())
        return super().forward(x)


def count(x: Tensor) -> None:
    STATISTICS["tokens"] += len(x)


class CountingOutside(Layer):
    """Has a function count what it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        count(x)
        return super().forward(x)


class Meter:
    def __init__(self) -> None:
        self.calls = 0


class Metered(Layer):
    """Counts in an object that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        self.meter.calls += 1
        return super().forward(x)


class Latest(Layer):
    """Keeps what its latest call made, which is the same however often it runs."""

    def forward(self, x: Tensor) -> Tensor:
        self.loss = self.router(x.contiguous()).logsumexp(-1).square().mean()
        return super().forward(x)


class TwoArguments(nn.Linear):
    def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(input) * scale


class Scaled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(TwoArguments(6, 6) for _ in range(4))

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows, 0.5)


class Checkpointed(Layer):
    """Checkpoints its experts itself."""

    reentrant = False

    def made(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return checkpoint(expert, rows, use_reentrant=self.reentrant)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedAgain(Checkpointed):
    reentrant = True


class Hashed(nn.Module):
    """No router: a token's expert follows from its place."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        chosen, out = torch.arange(len(flat), device=x.device) * 7 % 4, torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            out[chosen == index] = expert(flat[chosen == index])
        return out.view_as(x)


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = scores.argmax(-1) == index
            out[mask] = expert(x[mask]) * scores[mask][:, index, None]
        return out


class RoutedAbove(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.bank = nn.Linear(6, 4), Bank()

    def forward(self, x: Tensor) -> Tensor:
        return self.bank(x, self.router(x).softmax(-1))


def tied() -> nn.Module:
    layer = Layer()
    layer.shared.weight = layer.experts.get_parameter("1.weight")
    return layer


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def test_a_list_beside_a_router_is_found_with_what_comes_after_it() -> None:
    expected = ListedExperts("layers.0", "experts", ("0", "1", "2", "3"), frozenset({"shared"}))
    assert find_listed(Model(Layer())) == ([expected], {})


def test_a_list_whose_owner_keeps_what_its_latest_call_made_is_found() -> None:
    (found,), others = find_listed(Model(Latest()))
    assert (found.fqn, others) == ("layers.0", {})


@pytest.mark.by_day("Totalling")
@pytest.mark.parametrize("kind", [Counting, Keeping, Totalling, Numbering])
def test_a_list_whose_owner_adds_to_buffers_and_attributes_is_found(kind: type[Layer]) -> None:
    (found,), others = find_listed(Model(kind()))
    assert (others, found.draws, found.experts_draw) == ({}, False, False)


@pytest.mark.by_day("RoutedAbove-layers.0.bank")
@pytest.mark.parametrize(("kind", "owner"), [(Hashed, "layers.0"), (RoutedAbove, "layers.0.bank")])
def test_a_list_that_is_called_experts_needs_no_router_beside_it(
    kind: Callable[[], nn.Module], owner: str
) -> None:
    (found,), others = find_listed(Model(kind()))
    assert (found.fqn, found.num_experts, others) == (owner, 4, {})


def test_who_draws_random_numbers_is_found() -> None:
    for kind, expected in ((Noisy, (True, False)), (Dropping, (False, True))):
        (found,), _ = find_listed(Model(kind()))
        assert (found.draws, found.experts_draw) == expected


def test_a_first_pass_leaves_nothing_behind_in_what_has_the_list() -> None:
    layer = Totalling().double()
    layer.register_buffer("calls", torch.zeros(1))
    (found,), _ = find_listed(Model(Counting()))
    for owner in (Counting().double(), layer):
        before = dict(vars(owner))
        first_pass(owner, owner.forward, found, (torch.ones(2, 6, dtype=torch.float64),), {})
        assert vars(owner) == before
        assert not owner.get_buffer("calls")


def test_other_widths_are_found() -> None:
    layer = Layer()
    layer.experts = nn.ModuleList(
        nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(4)
    )
    (found,), _ = find_listed(Model(layer))
    assert (found.width, found.made_width) == (None, None)


def test_finding_draws_and_changes_nothing() -> None:
    model = Model(Layer())
    before = torch.get_rng_state(), {name: p.clone() for name, p in model.named_parameters()}
    children = [*model.modules()]
    find_listed(model)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(p, before[1][name]) for name, p in model.named_parameters())
    assert [*model.modules()] == children


@pytest.mark.by_day(
    "Parts-its forward does not call its experts",
    "CountingOutside-adds to a list or to numbers outside of it",
    "OfCounting-its experts write to their buffers, or keep something from call to call",
    "Scaled-are not called with one tensor",
    "CheckpointedAgain-calls its experts within torch.utils.checkpoint",
    "tied-an expert and something else share a parameter",
)
@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (Chain, "not those of its experts"),
        (OfNormalized, "not those of its experts"),
        (Parts, "its forward does not call its experts"),
        (Handing, "hands tensors to a list or an object outside of it"),
        (Logging, "adds to a list or to numbers outside of it"),
        (CountingOutside, "adds to a list or to numbers outside of it"),
        (OfCounting, "its experts write to their buffers, or keep something from call to call"),
        (Guessing, "draws from Python's random or from numpy"),
        (Metered, "adds to a list or to numbers outside of it"),
        (Scaled, "are not called with one tensor"),
        (Checkpointed, "calls its experts within torch.utils.checkpoint"),
        (CheckpointedAgain, "calls its experts within torch.utils.checkpoint"),
        (tied, "an expert and something else share a parameter"),
    ],
)
def test_other_lists_are_refused_by_name(layer: Callable[[], nn.Module], why: str) -> None:
    message = rf"found no experts in Model; .*list 'layers.0.experts' is not one of .*{why}"
    with pytest.raises(ValueError, match=message):
        find_experts(Model(layer()), 2)


class Layers(nn.Module):
    """Layers between an embedding of two tokens, as many as there are layers, and nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_is_said_of_layers_is_nothing_of_how_they_were_tried() -> None:
    why = "The list 'layers' is not one of experts: Layers, which has it, does not take rows of "
    with pytest.raises(ValueError, match=f"{why}features alone\\.$"):
        find_experts(Layers(), 2)


class Masked(Layers):
    """Is called with three tensors, or with ids alone, as models of transformers are."""

    def forward(self, ids: Any = None, mask: Any = None, positions: Any = None) -> Any:
        raise AssertionError("it is not run")


def test_of_a_model_without_experts_nothing_is_said_but_that() -> None:
    model = nn.Sequential(Masked())
    model[0].embed = nn.Embedding(5, 6)
    assert find_listed(model) == ([], {})
    with pytest.raises(ValueError, match=r"found no experts in Sequential; leave .* its rows\.$"):
        find_experts(model, 2)


def test_layers_of_one_kind_are_refused_in_one_sentence() -> None:
    model = Model(Guessing())
    model.layers.extend(Guessing() for _ in range(3))
    with pytest.raises(ValueError, match=r"The list 'layers\.\*\.experts' is not one") as error:
        find_experts(model, 2)
    assert str(error.value).count("Python's random") == 1


def test_a_list_without_a_router_is_none() -> None:
    layer = nn.Module()
    layer.heads = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
    assert find_listed(Model(layer)) == ([], {})


def test_ranks_have_consecutive_experts_in_numbers_that_differ_by_one() -> None:
    assert num_on_ranks(7, 3) == [3, 2, 2]
    assert [rank_of(index, 7, 3) for index in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert [rank_of(index, 2, 4) for index in range(2)] == [0, 1]
