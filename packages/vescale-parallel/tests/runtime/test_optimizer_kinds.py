"""Optimizers of whole parameters and declared ones: one device's steps, or a refusal by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vescale_dtensor import DTensor, RaggedShard, distribute_tensor
from vescale_parallel import ParallelPlan, declare_optimizer, parallelize, with_constraints

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
Make = Callable[[Any], Any]


class Lion(Optimizer):
    """Element by element, as users write it."""

    def __init__(self, params: Any, lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as users write it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                p.add_(torch.lerp(p.grad, state["average"], group["beta"]).sign(), alpha=-0.01)
                state["average"].lerp_(p.grad, 1 - group["beta"])


class Normalized(Optimizer):
    """Divides by the norm of the gradient, and keeps a list of tensors of other shapes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as users write it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    wide = p.reshape(p.shape[0] if p.dim() else 1, -1)
                    state["sums"] = [p.new_zeros(n) for n in wide.shape]
                    state["count"] = 0
                wide = p.grad.reshape(p.shape[0] if p.dim() else 1, -1)
                state["count"] += 1
                state["sums"][0] += wide.square().sum(1)
                state["sums"][1] += wide.square().sum(0)
                scale = state["sums"][0][:, None] * state["sums"][1][None, :]
                p.sub_((wide / (1e-3 + scale.sqrt())).view(p.shape), alpha=group["lr"])


class Coupled(Normalized):
    """Divides by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as users write it
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum(p.grad.square().sum() for p in params)
        for p in params:
            p.sub_(p.grad / total)


class Both(torch.optim.AdamW):
    """Muon's update for groups that say so, AdamW's for others, as a single class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]: as users write it
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if group["use_muon"]:
                    u, _, vh = torch.linalg.svd(p.grad, full_matrices=False)
                    p.sub_(u @ vh, alpha=group["lr"])
                    continue
                state = self.state[p]
                average = state.setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 0.1)
                p.sub_(average, alpha=group["lr"])


class Assigning(Lion):
    """Assigns new values to data, as old code does."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class AssigningWhole(Assigning):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad / p.grad.norm()


def both(model: Any) -> Optimizer:
    params = list(model.parameters())
    return Both(
        [
            {"params": [p for p in params if p.dim() == 2], "use_muon": True},
            {"params": [p for p in params if p.dim() != 2], "use_muon": False},
        ],
        lr=0.1,
    )


def two(model: Any) -> list[Optimizer]:
    params = list(model.parameters())
    matrices = [p for p in params if p.dim() == 2]
    return [
        torch.optim.Muon(matrices, lr=0.1),
        torch.optim.AdamW([p for p in params if p.dim() != 2], lr=0.1),
    ]


MAKE: dict[str, Make] = {
    "Muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.1),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1),
    "Adafactor foreach": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.1, foreach=True),
    "Lion": lambda m: Lion(m.parameters()),
    "Normalized": lambda m: Normalized(m.parameters()),
    "Both": both,
    "Assigning": lambda m: Assigning(m.parameters()),
    "AssigningWhole": lambda m: AssigningWhole(m.parameters()),
    "two": two,
}
WORLDS = [(2, 1, 1), (3, 3, 1), (4, 2, 1), (4, 3, 2), (2, 1, 2)]


@pytest.fixture(autouse=True)
def declared() -> None:  # pyright: ignore[reportUnusedFunction]: pytest calls it
    declare_optimizer(Lion, updates="elements")
    declare_optimizer(Normalized, updates="parameters")
    declare_optimizer(Both, updates="parameters")
    declare_optimizer(Assigning, updates="elements")
    declare_optimizer(AssigningWhole, updates="parameters")


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1))
    model[1].register_parameter("scale", nn.Parameter(torch.tensor(1.5)))
    model[2].bias.requires_grad_(False)
    return model.double()


def plan(size: int, stage: int = 1, copies: int = 1) -> ParallelPlan:
    constraints = {
        "data_parallel.size": size,
        "data_parallel.zero_stage": stage,
        "data_parallel.replicate_size": copies,
    }
    return with_constraints(ParallelPlan(), constraints)


def give(model: nn.Module, step: int) -> None:
    """Set gradients as a backward pass would have left them: none for what is frozen."""
    generator = torch.Generator().manual_seed(step)
    for index, p in enumerate(model.parameters()):
        grad = torch.randn(p.shape, dtype=torch.float64, generator=generator)
        placed: Any = (
            distribute_tensor(grad, p.device_mesh, p.placements)
            if isinstance(p, DTensor)
            else grad
        )
        p.grad = None if (index, step) == (2, 1) or not p.requires_grad else placed


def listed(optimizer: Any) -> list[Any]:
    return optimizer if isinstance(optimizer, list) else [optimizer]


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    return value.full_tensor() if isinstance(value, DTensor) else copy.deepcopy(value)


def steps(model: nn.Module, optimizer: Any, begin: int, end: int) -> None:
    for step in range(begin, end):
        give(model, step)
        for each in listed(optimizer):
            each.step()


def by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    return {names[p]: values for p, values in optimizer.state.items()}


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("size", "stage", "copies"), WORLDS)
def test_steps_are_one_devices_bit_for_bit(
    in_threads: InThreads, name: str, size: int, stage: int, copies: int
) -> None:
    make = MAKE[name]
    expected, models = net(), [net() for _ in range(size)]
    reference = make(expected)
    steps(expected, reference, 0, 3)

    def on_rank(rank: int) -> Any:
        model, optimizer = parallelize(plan(size, stage, copies), models[rank], make)
        steps(model, optimizer, 0, 3)
        state = [whole(each.state_dict()["state"]) for each in listed(optimizer)]
        return [p.detach().full_tensor() for p in model.parameters()], state

    for values, states in in_threads(size, on_rank):
        for got, parameter in zip(values, expected.parameters(), strict=True):
            assert torch.equal(got, parameter)
        for state, each in zip(states, listed(reference), strict=True):
            wanted = by_name(expected, each)
            assert state.keys() == wanted.keys()
            for fqn, held in wanted.items():
                assert_equal(state[fqn], held)


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "Lion", "Normalized"])
def test_a_state_goes_on_under_another_plan_and_from_one_device(
    in_threads: InThreads, name: str
) -> None:
    make = MAKE[name]
    expected, models, more = net(), [net() for _ in range(2)], [net() for _ in range(3)]
    reference = make(expected)
    steps(expected, reference, 0, 2)
    halfway = copy.deepcopy(expected.state_dict())
    of_one_device = {
        "state": copy.deepcopy(by_name(expected, reference)),
        "param_groups": [
            {
                **group,
                "params": [n for n, p in expected.named_parameters() if p in set(group["params"])],
            }
            for group in reference.param_groups
        ],
    }
    steps(expected, reference, 2, 3)

    def first(rank: int) -> Any:
        model, optimizer = parallelize(plan(2), models[rank], make)
        steps(model, optimizer, 0, 2)
        saved = optimizer.state_dict()
        return {**saved, "state": whole(saved["state"])}

    saved, _ = in_threads(2, first)
    for model in more:
        model.load_state_dict(halfway)

    def then(given: Any) -> Callable[[int], Any]:
        def on_rank(rank: int) -> Any:
            model, optimizer = parallelize(plan(3, 3), copy.deepcopy(more[rank]), make)
            optimizer.load_state_dict(given)
            # Its own state, distributed, as a checkpoint that was read in place would give it.
            optimizer.load_state_dict(optimizer.state_dict())
            steps(model, optimizer, 2, 3)
            return [p.detach().full_tensor() for p in model.parameters()]

        return on_rank

    for given in (saved, of_one_device):
        for found in in_threads(3, then(given)):
            for got, parameter in zip(found, expected.parameters(), strict=True):
                assert torch.equal(got, parameter)


def test_a_template_has_what_a_step_would_make(in_threads: InThreads) -> None:
    models, more = [net() for _ in range(2)], [net() for _ in range(2)]

    def flat(prefix: str, value: Any) -> dict[str, Any]:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found: dict[str, Any] = {}
        for key, each in items:
            path = f"{prefix}.{key}"
            found |= flat(path, each) if isinstance(each, dict | list) else {path: each}
        return found

    def on_rank(rank: int) -> None:
        for name in ("Muon", "Adafactor", "Normalized"):
            model, optimizer = parallelize(plan(2), copy.deepcopy(models[rank]), MAKE[name])
            _, fresh = parallelize(plan(2), copy.deepcopy(more[rank]), MAKE[name])
            steps(model, optimizer, 0, 1)
            saved = {
                path: value
                for path, value in flat("state", optimizer.state_dict()["state"]).items()
                if isinstance(value, Tensor)
            }
            made = flat("state", fresh.state_template(saved)["state"])
            assert made.keys() == saved.keys()
            for path, value in saved.items():
                one = made[path]
                assert (type(one), one.shape, one.dtype) == (type(value), value.shape, value.dtype)
                if isinstance(value, DTensor):
                    assert all(isinstance(each, RaggedShard) for each in value.placements)
                    assert one.placements == value.placements

    in_threads(2, on_rank)


def test_state_is_on_one_rank(in_threads: InThreads) -> None:
    models = [net() for _ in range(2)]

    def on_rank(rank: int) -> set[str]:
        model, optimizer = parallelize(plan(2), models[rank], MAKE["Muon"])
        steps(model, optimizer, 0, 1)
        return set(by_name(model, optimizer))

    first, second = in_threads(2, on_rank)
    assert first | second == {"0.weight", "1.weight", "2.weight"}
    assert not first & second


def refused(in_threads: InThreads, make: Make) -> str:
    models = [net() for _ in range(2)]

    def on_rank(rank: int) -> str:
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (looked at by the caller)
            parallelize(plan(2), models[rank], make)
        return str(caught.value)

    first, second = in_threads(2, on_rank)
    assert first == second
    return first


FALSE: dict[str, tuple[type[Optimizer], str, str]] = {
    "rows": (Normalized, "elements", r"on a small example .* differs|gets other values"),
    "coupled": (Coupled, "parameters", "a parameter gets other values without the others"),
    "coupled elements": (Coupled, "elements", "gets other values"),
}


@pytest.mark.parametrize("case", FALSE)
def test_a_false_declaration_is_refused_by_name(in_threads: InThreads, case: str) -> None:
    cls, updates, message = FALSE[case]
    declare_optimizer(cls, updates=updates)  # pyright: ignore[reportArgumentType]: one of the two
    told = refused(in_threads, lambda m: cls(m.parameters()))  # pyright: ignore[reportCallIssue]: a subclass has defaults
    assert told.startswith(f"{cls.__name__} is declared to update {updates}, but on a small")
    assert re.search(message, told)


REFUSED: dict[str, tuple[Make, str]] = {
    "LBFGS": (
        lambda m: torch.optim.LBFGS(m.parameters()),
        "LBFGS couples all parameters and calls the model in a closure; make it after parallelize",
    ),
    "SparseAdam": (
        lambda m: torch.optim.SparseAdam(list(m.parameters())),
        "SparseAdam takes sparse gradients only",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_on_shards_is_refused_with_what_to_do(
    in_threads: InThreads, name: str
) -> None:
    make, message = REFUSED[name]
    assert refused(in_threads, make).startswith(message)


def test_a_subclass_with_another_step_is_not_declared(in_threads: InThreads) -> None:
    class Other(Lion):
        def step(self, closure: Any = None) -> None:
            super().step(closure)

    told = refused(in_threads, lambda m: Other(m.parameters()))
    assert "vescale.declare_optimizer(Other, updates='elements' or 'parameters')" in told


def test_an_optimizer_that_hides_parameters_is_refused(in_threads: InThreads) -> None:
    class Hiding(Lion):
        def __init__(self, params: Any) -> None:
            self.kept = list(params)
            super().__init__(self.kept)

    told = refused(in_threads, lambda m: Hiding(m.parameters()))
    assert told.startswith("Hiding holds a DTensor in its attribute 'kept'")


def test_only_optimizers_and_known_words_are_declared() -> None:
    with pytest.raises(TypeError, match=r"expected a class of torch.optim.Optimizer, got 3"):
        declare_optimizer(3, updates="elements")  # pyright: ignore[reportArgumentType]: what is tested
    with pytest.raises(ValueError, match=r"expected updates to be one of .*, got 'rows'"):
        declare_optimizer(Lion, updates="rows")  # pyright: ignore[reportArgumentType]: what is tested
