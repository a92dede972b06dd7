"""Who makes what takes the place of a deferred tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_deferred import deferred_init, is_deferred, materialize
from vescale_dtensor import Box

Read = Callable[[Box | None], Tensor]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(10).float(), persistent=False)
        self.embedding.weight.note = "kept"  # pyright: ignore[reportAttributeAccessIssue]
        self.keeper = [self.embedding.weight]


def _ordinary_and_deferred() -> tuple[Any, Any]:
    torch.manual_seed(5)
    ordinary = _Tied()
    torch.manual_seed(5)
    return ordinary, deferred_init(_Tied)


def test_a_maker_is_asked_once_for_every_tensor_and_ties_are_kept():
    ordinary, module = _ordinary_and_deferred()
    asked: list[str] = []

    def make(fqn: str, tensor: Tensor, read: Read) -> Tensor:
        assert is_deferred(tensor)
        asked.append(fqn)
        rows = tensor.shape[0] // 2
        return read(Box((rows, *(0,) * (tensor.dim() - 1)), (rows, *tensor.shape[1:])))

    assert materialize(module, make=make) is module
    assert asked == ["table", "embedding.weight", "head.bias"]
    assert module.head.weight is module.embedding.weight is module.keeper[0]
    assert type(module.head.weight) is nn.Parameter
    assert type(module.table) is Tensor
    assert vars(module.head.weight)["note"] == "kept"
    assert torch.equal(module.head.weight, ordinary.head.weight[5:])
    assert torch.equal(module.table, ordinary.table[5:])
    assert "table" not in module.state_dict()


def test_a_maker_may_keep_the_deferred_tensor_or_return_a_parameter_of_its_own():
    _, module = _ordinary_and_deferred()
    own = nn.Parameter(torch.zeros(2), requires_grad=False)

    def make(fqn: str, tensor: Tensor, read: Read) -> Tensor:
        return own if fqn == "head.bias" else tensor

    materialize(module, make=make)
    assert module.head.bias is own
    assert is_deferred(module.embedding.weight)
    assert not is_deferred(materialize(module))


def test_real_tensors_are_offered_to_the_maker_too():
    module = nn.Linear(4, 4)
    expected = module.weight.detach().clone()
    materialize(module, make=lambda fqn, tensor, read: read(None)[:2])
    assert torch.equal(module.weight, expected[:2])
    assert module.weight.requires_grad


def test_parts_of_a_module_can_be_materialised_one_by_one():
    ordinary, module = _ordinary_and_deferred()
    materialize(module.embedding)
    assert is_deferred(module)
    materialize(module)
    assert module.head.weight is module.embedding.weight is module.keeper[0]
    assert torch.equal(module.head.weight, ordinary.head.weight)
    assert torch.equal(module.head.bias, ordinary.head.bias)


def test_attributes_of_parameters_survive():
    _, module = _ordinary_and_deferred()
    materialize(module)
    assert module.embedding.weight.note == "kept"
    assert not hasattr(module.embedding.weight, "deferral")


def test_materialising_a_real_module_changes_nothing():
    module = nn.Linear(3, 3)
    weight = module.weight
    assert materialize(module).weight is weight


@dataclass(frozen=True)
class Table:
    angles: torch.Tensor


class Rotary:
    """A plain object with tensors, which is part of a chain of them."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.table = Table(torch.rand(3))


class WithObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.rotary: Any = None
        for _ in range(2000):  # longer than Python recurses
            self.rotary = Rotary(self.rotary)
        self.rotary.owner = self
        self.rotary.rows = {"first": (self.linear.weight[0], [SimpleNamespace(w=torch.ones(2))])}
        self.hidden = [nn.Linear(2, 2)]


def test_tensors_in_objects_of_any_class_are_materialised():
    torch.manual_seed(0)
    ordinary = WithObjects()
    torch.manual_seed(0)
    module = materialize(deferred_init(WithObjects))
    here, there = module.rotary, ordinary.rotary
    (row, rest), (expected_row, expected_rest) = here.rows["first"], there.rows["first"]
    assert torch.equal(row, expected_row)
    assert torch.equal(rest[0].w, expected_rest[0].w)
    while here is not None:
        assert torch.equal(here.table.angles, there.table.angles)
        here, there = here.before, there.before


def test_a_module_that_is_not_registered_is_materialised_on_its_own():
    torch.manual_seed(0)
    ordinary = WithObjects()
    torch.manual_seed(0)
    module = materialize(deferred_init(WithObjects))
    assert is_deferred(module.hidden[0])
    assert torch.equal(materialize(module.hidden[0]).weight, ordinary.hidden[0].weight)
