"""To whoever looks, a parallelized model is the model of one device, on every rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import vescale
from vescale_testing import World

from .models import HandWritten, batches, build
from .plans import DP, FOUR, ONE, PARTS, PP, TP, TWO, Constraints, make_plan
from .training import whole

NOTE = "note"  # an attribute that torch does not know
# A plan of each kind.
KINDS: dict[str, tuple[int, Constraints]] = {
    "nothing": (1, ONE["nothing"]),
    "dp": (2, TWO["dp"]),
    "zero3": (2, TWO["zero3"]),
    "tp": (2, TWO["tp"]),
    "pp": (2, TWO["pp-1f1b"]),
    "tp-zero3": (4, FOUR["tp-zero3"]),
    "pp-zero1": (4, FOUR["pp-zero1"]),
    "pp-tp": (4, FOUR["pp-tp"]),
}


class WithBuffers(HandWritten):
    """Buffers that are random, not saved, shared, integers, and in a block."""

    def __init__(self) -> None:
        super().__init__()
        noise = torch.randn(5, 3)
        self.register_buffer("noise", noise)
        self.register_buffer("unsaved", torch.rand(7), persistent=False)
        self.register_buffer("shared", noise)
        self.blocks[1].register_buffer("count", torch.tensor(3))


def construct(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return WithBuffers() if name == "hand_written" else build(name)


def defer(name: str) -> nn.Module:
    torch.manual_seed(0)
    return vescale.deferred_init(WithBuffers if name == "hand_written" else lambda: build(name))


CONSTRUCTORS: dict[str, Callable[[str], nn.Module]] = {"eager": construct, "deferred": defer}


@pytest.fixture
def worlds(world1: World, world2: World, world4: World) -> dict[int, World]:
    return {1: world1, 2: world2, 4: world4}


every_kind = pytest.mark.parametrize("kind", KINDS)
every_model = pytest.mark.parametrize("name", ["llama", "gpt2", "hand_written"])


def on_every_rank(
    worlds: dict[int, World], fn: Callable[..., None], kind: str, *args: Any
) -> None:
    ranks, constraints = KINDS[kind]
    worlds[ranks].run(fn, constraints, *args)


def names_and_shapes(model: nn.Module) -> list[tuple[str, torch.Size, torch.dtype, bool]]:
    return [(fqn, p.shape, p.dtype, p.requires_grad) for fqn, p in model.named_parameters()]


def shapes(constraints: Constraints, name: str) -> None:
    model, expected = construct(name), construct(name)
    cls, children = type(model), [fqn for fqn, _ in model.named_modules()]
    assert vescale.parallelize(make_plan(constraints), model) is model
    assert isinstance(model, cls)
    assert type(model).__name__ == cls.__name__
    assert [fqn for fqn, _ in model.named_modules()] == children
    assert names_and_shapes(model) == names_and_shapes(expected)
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in expected.parameters()
    )
    state, expected_state = model.state_dict(), expected.state_dict()
    assert [(key, value.shape) for key, value in state.items()] == [
        (key, value.shape) for key, value in expected_state.items()
    ]
    assert dict(model.named_buffers()).keys() == dict(expected.named_buffers()).keys()


@pytest.mark.by_day("gpt2-nothing", "gpt2-dp", "gpt2-zero3", "gpt2-tp", "gpt2-pp", "gpt2-pp-zero1")
@pytest.mark.slow
@every_kind
@every_model
def test_names_order_and_shapes_are_those_of_one_device_on_every_rank(
    worlds: dict[int, World], kind: str, name: str
) -> None:
    on_every_rank(worlds, shapes, kind, name)


def assert_same_bits(model: nn.Module, expected: nn.Module) -> None:
    for (fqn, p), (_, other) in zip(
        model.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert torch.equal(whole(p), other), fqn
    for (fqn, b), (_, other) in zip(model.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(whole(b), other), fqn


def construction(constraints: Constraints, name: str, how: str) -> None:
    model = vescale.parallelize(make_plan(constraints), CONSTRUCTORS[how](name))
    assert_same_bits(model, construct(name))


@pytest.mark.by_day(
    "eager-gpt2-nothing",
    "eager-gpt2-dp",
    "eager-gpt2-zero3",
    "eager-gpt2-tp",
    "eager-gpt2-pp",
    "eager-gpt2-pp-zero1",
    "deferred-gpt2-nothing",
    "deferred-gpt2-tp",
)
@pytest.mark.slow
@every_kind
@every_model
@pytest.mark.parametrize("how", CONSTRUCTORS)
def test_parameters_and_buffers_have_the_bits_of_ordinary_construction(
    worlds: dict[int, World], kind: str, name: str, how: str
) -> None:
    on_every_rank(worlds, construction, kind, name, how)


def load_full(constraints: Constraints, name: str) -> None:
    model, expected = construct(name), construct(name)
    model = vescale.parallelize(make_plan(constraints), model)
    other = construct(name, seed=1).state_dict()
    expected.load_state_dict(other)
    outcome = model.load_state_dict(other)
    assert (outcome.missing_keys, outcome.unexpected_keys) == ([], [])
    assert_same_bits(model, expected)


@pytest.mark.by_day("gpt2-nothing", "gpt2-dp", "gpt2-zero3", "gpt2-tp", "gpt2-pp", "gpt2-pp-zero1")
@pytest.mark.slow
@every_kind
@every_model
def test_an_ordinary_state_dict_loads(worlds: dict[int, World], kind: str, name: str) -> None:
    on_every_rank(worlds, load_full, kind, name)


def ties(constraints: Constraints, how: str) -> None:
    model = vescale.parallelize(make_plan(constraints), CONSTRUCTORS[how]("gpt2"))
    embedding, head = "model.transformer.wte.weight", "model.lm_head.weight"
    assert model.get_parameter(embedding) is model.get_parameter(head)
    model = vescale.parallelize(make_plan(constraints), CONSTRUCTORS[how]("hand_written"))
    assert model.get_buffer("noise") is model.get_buffer("shared")


@pytest.mark.by_day(
    "eager-nothing", "eager-zero3", "deferred-nothing", "deferred-dp", "deferred-tp", "deferred-pp"
)
@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("how", CONSTRUCTORS)
def test_what_is_tied_stays_tied(worlds: dict[int, World], kind: str, how: str) -> None:
    on_every_rank(worlds, ties, kind, how)


def attributes(constraints: Constraints) -> None:
    model = construct("hand_written")
    for fqn, parameter in model.named_parameters():
        setattr(parameter, NOTE, (fqn, parameter.dim() < 2))
    model = vescale.parallelize(make_plan(constraints), model)
    for fqn, parameter in model.named_parameters():
        assert getattr(parameter, NOTE) == (fqn, parameter.dim() < 2)


@pytest.mark.by_day("nothing", "dp", "zero3", "tp", "pp", "pp-zero1")
@pytest.mark.slow
@every_kind
def test_attributes_of_parameters_survive(worlds: dict[int, World], kind: str) -> None:
    on_every_rank(worlds, attributes, kind)


def make_loss(model: nn.Module, constraints: Constraints, rank: int) -> Tensor:
    """Run the model on this rank's rows of one global batch."""
    replicas = constraints.get(DP, 1)
    # The data axes lie outside tp and inside pp.
    replica = rank // constraints.get(TP, 1) % replicas
    return model({k: v.chunk(replicas)[replica] for k, v in batches(1)[0].items()})


def count_calls(constraints: Constraints) -> Counter[str]:
    model = construct("hand_written")
    calls: Counter[str] = Counter()

    def watch(when: str) -> None:
        for fqn in ("embed", "blocks.0", "blocks.3", "head"):
            module = model.get_submodule(fqn)

            def count(_: nn.Module, *__: Any, key: str = f"{fqn} {when}") -> None:
                calls[key] += 1

            module.register_forward_pre_hook(count)
            module.register_forward_hook(count)

    watch("before")
    model = vescale.parallelize(make_plan(constraints), model)
    watch("after")
    make_loss(model, constraints, int(os.environ["RANK"])).backward()
    return calls


@pytest.mark.by_day("nothing", "zero3", "pp")
@pytest.mark.slow
@every_kind
def test_forward_hooks_fire_where_the_module_runs(worlds: dict[int, World], kind: str) -> None:
    ranks, constraints = KINDS[kind]
    stages, parts = constraints.get(PP, 1), constraints.get(PARTS, 1)
    for rank, calls in enumerate(worlds[ranks].run(count_calls, constraints)):
        stage = rank * stages // ranks
        expected: Counter[str] = Counter()
        for fqn, owner in (("embed", 0), ("blocks.0", 0), ("blocks.3", -1), ("head", -1)):
            if stage == owner % stages:
                # A hook before and one after, for every micro-batch.
                expected |= {f"{fqn} before": 2 * parts, f"{fqn} after": 2 * parts}
        assert calls == expected, rank


def gradients(constraints: Constraints, when: str) -> None:
    model, alone = construct("hand_written").double(), construct("hand_written").double()
    seen: dict[str, list[Tensor]] = {}

    def hook(fqn: str) -> Callable[[Tensor], Tensor]:
        def keep_and_double(grad: Tensor) -> Tensor:
            seen.setdefault(fqn, []).append(whole(grad))
            return grad * 2

        return keep_and_double

    watched = ("embed.weight", "positions", "blocks.0.gain", "blocks.3.mlp.0.weight", "head.bias")
    if when == "after":
        model = vescale.parallelize(make_plan(constraints), model)
    for fqn in watched:
        model.get_parameter(fqn).register_hook(hook(fqn))
    if when == "before":
        model = vescale.parallelize(make_plan(constraints), model)
    make_loss(model, constraints, int(os.environ["RANK"])).backward()
    alone(batches(1)[0]).backward()
    assert sorted(seen) == sorted(watched)
    for fqn in watched:
        expected, grad = alone.get_parameter(fqn).grad, model.get_parameter(fqn).grad
        assert expected is not None
        assert grad is not None
        (reduced,) = seen[fqn]
        # Rounding of float64: gradients are of order 0.01 and summed over ranks.
        torch.testing.assert_close(reduced, expected, rtol=1e-10, atol=1e-14)
        assert torch.equal(whole(grad), 2 * reduced)


@pytest.mark.by_day("nothing-before", "dp-after", "zero3-before")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "when"), [*product(KINDS, ["before", "after"])])
def test_a_hook_of_a_parameter_gets_the_reduced_gradient_once(
    worlds: dict[int, World], kind: str, when: str
) -> None:
    on_every_rank(worlds, gradients, kind, when)


def groups(constraints: Constraints) -> None:
    model = construct("gpt2")
    expected = [(p.dim(), p.numel()) for p in model.parameters()]

    def by_dim(model: nn.Module) -> SGD:
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        return SGD([{"params": matrices, "weight_decay": 0.1}, {"params": others}], lr=0.1)

    model, optimizer = vescale.parallelize(make_plan(constraints), model, by_dim)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    assert sorted((p.dim(), p.numel()) for p in held) == sorted(expected)


@pytest.mark.by_day("nothing", "dp", "zero3", "tp", "pp", "tp-zero3", "pp-zero1")
@pytest.mark.slow
@every_kind
def test_an_optimizer_holds_every_parameter_on_every_rank(
    worlds: dict[int, World], kind: str
) -> None:
    on_every_rank(worlds, groups, kind)
