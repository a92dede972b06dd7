"""Functions of sliced tensors, on threads, against those of the whole on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_parallel._cross_replica.context.sliced.rules import computed
from vescale_parallel._cross_replica.context.sliced.tensor import (
    Along,
    Call,
    SlicedTensor,
    gathered,
)
from vescale_parallel._cross_replica.context.slices import ContextThreads, Method, SequenceSlices
from vescale_parallel._tensor_parallel.communicators import ThreadExchange
from vescale_parallel._verify.threads import run_in_threads

ROWS, LENGTH, FEATURES = 2, 7, 5
Function = Callable[[Tensor, Tensor, Tensor], Tensor]
MASK = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % 3 > 0


def _in_place(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    x = x * 1.0
    x /= 2
    x.mul_(w).tanh_()
    return x.square().mean()


def _written_alike(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    x = x + 0
    same = x
    same.masked_fill_(~MASK[..., None], 0.0)
    return (x * w).sum()


# Computed on slices alone, but for what is said to be gathered: nothing is.
ON_SLICES: dict[str, Function] = {
    "shifted": lambda x, w, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "padded labels": lambda x, w, y: F.cross_entropy(
        x.double().contiguous().view(-1, FEATURES),
        F.pad(y, (0, 1), value=-100)[..., 1:].reshape(-1),
    ),
    "far": lambda x, w, y: F.cross_entropy(x[:, 3:].flatten(0, 1), y[:, 3:].flatten()),
    "one position": lambda x, w, y: F.cross_entropy(x[:, -1:].flatten(0, 1), y[:, -1]),
    "features first": lambda x, w, y: F.cross_entropy(x.transpose(1, 2), y, ignore_index=2),
    "permuted": lambda x, w, y: (
        F.nll_loss(x.permute(1, 2, 0).log_softmax(1), y.T, weight=w.detach())
    ),
    "smoothed": lambda x, w, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), label_smoothing=0.2),
    "summed": lambda x, w, y: (
        F.cross_entropy(input=x.flatten(0, 1), target=y.flatten(), reduction="sum")
    ),
    "soft": lambda x, w, y: (
        F.cross_entropy(x.flatten(0, 1), F.one_hot(y, FEATURES).double().flatten(0, 1))
    ),
    "of each": lambda x, w, y: (
        F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction="none").view(ROWS, LENGTH) * MASK
    ).sum() / MASK.sum(),
    "picked": lambda x, w, y: x.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1).mean(),
    "z": lambda x, w, y: x.logsumexp(dim=-1).pow(2).mean() + x.mean(),
    "of rows": lambda x, w, y: (
        (x.sum(1) * w).sum() + x.mean((1, 2)).square().sum() + x.amax(-1).sum()
    ),
    "kept dims": lambda x, w, y: (
        (x - x.mean(-1, keepdim=True)).square().sum((0, 1), keepdim=True).mul(w).sum()
    ),
    "linear": lambda x, w, y: (F.linear(x, w.diag()) @ w[:, None]).squeeze(-1).square().sum(),
    "norms": lambda x, w, y: (
        F.layer_norm(F.rms_norm(x, (FEATURES,), w), (FEATURES,), w).pow(3).sum()
    ),
    "whole beside": lambda x, w, y: (
        (x + y[..., None] * w).where(MASK[..., None], 0.0).square().sum()
    ),
    "heads": lambda x, w, y: (
        (x.unsqueeze(2).reshape(ROWS, LENGTH, FEATURES, 1).squeeze(-1) * w).sum()
    ),
    "rejoined": lambda x, w, y: (
        (x.reshape(-1, FEATURES).view(ROWS, -1, FEATURES)[:, 1:] * w).square().sum()
    ),
    "parts": lambda x, w, y: (
        sum((each.sum(1).square().sum() for each in x.split(2, 1)), x.new_zeros(()))
    ),
    "counted": lambda x, w, y: x.sum() * (x.argmax(-1) == y).sum() + x.shape[1] * x.size(-1),
    "in place": _in_place,
    "written": _written_alike,
}  # fmt: skip
GATHERED: dict[str, Function] = {
    "positions first": lambda x, w, y: (
        F.cross_entropy(x.transpose(0, 1)[1:].flatten(0, 1), y.T[1:].flatten())
    ),
    "a place": lambda x, w, y: (x[:, 0] * w).sum() + x[:, -1].square().sum(),
    "steps": lambda x, w, y: x[:, ::2].square().sum(),
    "chosen": lambda x, w, y: x[MASK].square().sum(),
    "added up": lambda x, w, y: x.cumsum(1).square().sum(),
    "sorted": lambda x, w, y: x.sort(1).values[:, 2].sum(),
    "along": lambda x, w, y: x.softmax(1).square().sum() + x.max(),
    "joined": lambda x, w, y: torch.cat([x, x.flip(1)], 1).square().sum(),
    "products": lambda x, w, y: (x @ x.mT).square().sum(),
    "turned": lambda x, w, y: F.conv1d(x.mT, w.expand(1, FEATURES, FEATURES)).sum(),
}  # fmt: skip


def given() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, FEATURES, generator=generator, dtype=torch.float64)
    w = torch.rand(FEATURES, generator=generator, dtype=torch.float64) + 0.5
    y = torch.randint(FEATURES, (ROWS, LENGTH), generator=generator)
    return x.requires_grad_(), w.requires_grad_(), y


def on_rank(
    function: Callable[..., Any], method: Method, threads: ThreadExchange, rank: int
) -> Any:
    """Return a value, gradients, and how many tensors were gathered."""
    ranks, (x, w, y) = ContextThreads(threads, rank), given()
    slices, notes = SequenceSlices.over(LENGTH, threads.size, method), list[None]()
    call = Call(0, lambda: notes.append(None))
    along = Along(1, 1, slices, ranks, call, computed)
    value: Any = gathered(function(SlicedTensor.of(slices.part(x, 1, rank), along), w, y))
    call.end()
    assert type(value) is Tensor
    value.backward()
    return value.detach(), x.grad, w.grad, len(notes)


def check(name: str, function: Function, method: Method, size: int) -> list[int]:
    x, w, y = given()
    expected = function(x, w, y)
    expected.backward()
    found = run_in_threads(size, lambda rank, threads: on_rank(function, method, threads, rank))
    for value, *_ in found:
        torch.testing.assert_close(value, expected.detach(), rtol=1e-13, atol=1e-13, msg=name)
    for at, whole in ((1, x.grad), (2, w.grad)):
        grads = [each[at] for each in found if each[at] is not None]
        assert bool(grads) == (whole is not None), name
        if whole is not None:  # gradients are averaged over the ranks of a sequence
            mean = sum(grads, torch.zeros_like(whole)) / size
            torch.testing.assert_close(mean, whole, rtol=1e-12, atol=1e-12, msg=name)
    return [each[-1] for each in found]


@pytest.mark.parametrize(("method", "size"), [("all_to_all", 3), ("ring", 2)])
def test_functions_of_tokens_are_computed_on_slices(method: Method, size: int) -> None:
    for name, function in ON_SLICES.items():
        assert check(name, function, method, size) == [0] * size, name


@pytest.mark.parametrize(("method", "size"), [("all_to_all", 3), ("ring", 2)])
def test_other_functions_get_the_whole(method: Method, size: int) -> None:
    for name, function in GATHERED.items():
        counts = check(name, function, method, size)
        assert all(counts), name
        assert len({*counts}) == 1, name


def _written_through(view: Callable[[Tensor], Tensor]) -> Function:
    def written(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        x = x * w
        with torch.no_grad():
            view(x).mul_(2)
        return x.sum()

    return written


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda x: x.data,
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "unfold": lambda x: x.unfold(1, 2, 2)[0],
    "as_strided": lambda x: x.as_strided((2,), (1,)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_is_written_through_a_view_of_the_whole_is_refused(name: str) -> None:
    function = _written_through(VIEWS[name])
    with pytest.raises(
        ValueError, match=f"behind the blocks code writes to what '{name}' returned"
    ):
        run_in_threads(2, lambda rank, threads: on_rank(function, "all_to_all", threads, rank))


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.expand(ROWS, LENGTH, FEATURES)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], type[Exception], str]] = {
    "own function": (lambda x, w, y: _Own.apply(x), RuntimeError, "autograd.Function behind"),
    "written parts": (
        lambda x, w, y: x.index_fill_(1, y[0], 0.0), ValueError, "'index_fill_' writes",
    ),
    "set": (
        lambda x, w, y: x.__setitem__((slice(None), 0), 0.0),
        ValueError, "'__setitem__' writes",
    ),
    "out": (lambda x, w, y: torch.add(x.detach(), 1, out=x.detach()), ValueError, "writes"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_slice_does_not_know_is_refused(name: str) -> None:
    function, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text) as error:
        run_in_threads(2, lambda rank, threads: on_rank(function, "all_to_all", threads, rank))
    assert "context_parallel.outputs 'whole'" in str(error.value)
