"""Which scalar is the loss, and what is in the place of tensors that a step does not return."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_parallel._loss.loss_fn import check_loss_fn, give_loss
from vescale_parallel._loss.output import loss_of, only_scalars, refuse_closed


def scalar(value: float, *, grad: bool = True) -> Tensor:
    return torch.tensor(value, requires_grad=grad)


@dataclass
class Output:
    total: Tensor
    aux: Tensor


def test_what_is_called_loss_is_the_loss() -> None:
    output = {"ce": scalar(1.0), "loss": scalar(2.0)}
    assert loss_of(output) is output["loss"]


def test_a_lone_scalar_is_the_loss() -> None:
    output = (torch.ones(2), scalar(1.0))
    assert loss_of(output) is output[1]


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ({"ce": scalar(1.0), "loss": scalar(2.0)}, "ce"),
        ((scalar(2.0), scalar(1.0)), 1),
        ([scalar(2.0), scalar(1.0)], -1),
        ({"loss": scalar(2.0), "ce": scalar(1.0)}, 1),
        (Output(scalar(1.0), scalar(2.0)), "total"),
    ],
)
def test_the_plan_names_the_loss(output: Any, name: str | int) -> None:
    assert loss_of(output, name).item() == 1.0


def test_of_several_scalars_none_is_guessed() -> None:
    message = r"2 scalars, .* pipeline_parallel.loss, .* one of \['\[0\]', '\[1\]'\]"
    with pytest.raises(ValueError, match=message):
        loss_of((scalar(1.0), scalar(2.0)))


@pytest.mark.parametrize(
    ("output", "name"),
    [({"ce": scalar(1.0)}, "los"), ((scalar(1.0),), 1), ({"x": torch.ones(2)}, "x"), (None, 0)],
)
def test_a_loss_that_is_named_and_not_there_is_refused(output: Any, name: str | int) -> None:
    with pytest.raises(ValueError, match=f"a scalar {name!r}, which pipeline_parallel.loss names"):
        loss_of(output, name)


@dataclass
class Closed:
    loss: Tensor


def test_an_object_that_torch_does_not_open_is_refused_with_how_to_open_it() -> None:
    closed = Closed(scalar(1.0))
    for output in (closed, (closed, 3), {"out": closed, "kept": scalar(1.0, grad=False)}):
        with pytest.raises(TypeError, match=r"got a Closed, .*register_pytree_node\(Closed, "):
            refuse_closed(output)
    with pytest.raises(TypeError, match="got a Closed"):
        loss_of(closed)
    with pytest.raises(TypeError, match="got a Closed"):
        refuse_closed(Closed(scalar(1.0, grad=False)), has_graph=False)
    # A loss beside it; nothing to differentiate.
    for output in ((scalar(1.0), closed), Closed(scalar(1.0, grad=False)), None):
        refuse_closed(output)


def test_a_tensor_that_is_not_returned_says_so_when_it_is_used() -> None:
    output = only_scalars({"loss": scalar(1.0), "logits": torch.ones(2)}, "nowhere")
    logits: Any = output["logits"]
    assert output["loss"].requires_grad
    assert not isinstance(logits, Tensor)
    assert repr(copy.copy(logits)) == repr(pickle.loads(pickle.dumps(logits)))
    uses = (lambda: logits.argmax(-1), lambda: torch.add(logits, 1), lambda: logits[0])
    for use in (*uses, lambda: torch.stack([logits]), lambda: bool(logits), lambda: logits == 1):
        with pytest.raises(ValueError, match=r"\['logits'\] of .* pipeline_parallel.outputs to"):
            use()


class Pair(torch.nn.Module):
    def forward(self, a: Tensor, b: int = 1, *, scale: int = 1) -> Tensor:
        return a * b * scale


class Open(torch.nn.Module):
    def forward(self, *xs: Tensor, **options: int) -> Tensor:
        return sum(xs, torch.zeros(())) * options.get("scale", 1)


def difference(output: Tensor, target: Tensor) -> Tensor:
    return output - target


def test_forward_takes_targets_by_keyword_or_behind_its_arguments() -> None:
    pair, summed, x, y = Pair(), Open(), torch.tensor(5.0), torch.tensor(2.0)
    undo = give_loss(pair, difference)
    give_loss(summed, difference)
    assert pair(x, target=y) == 3
    assert pair(x, 2, y, scale=2) == 18
    assert copy.deepcopy(pair)(x, b=3, target=y) == 13
    assert pair(x, 2, scale=2) == 20
    assert summed(x, x, target=y, scale=2) == 18
    assert type(pair).__name__ == "Pair"
    undo()
    assert type(pair) is Pair


class TakesTarget(torch.nn.Module):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return x - target


@pytest.mark.parametrize(
    ("model", "loss_fn", "message"),
    [
        (Pair(), torch.nn.CrossEntropyLoss, "expected loss_fn to be a function"),
        (Pair(), torch.nn.Linear(2, 2), "has parameters, which nobody would shard or train"),
        (TakesTarget(), difference, "takes 'target' itself"),
    ],
)
def test_what_cannot_be_a_loss_function_is_refused(
    model: torch.nn.Module, loss_fn: Any, message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        check_loss_fn(model, loss_fn)
