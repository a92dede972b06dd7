"""Losses of distributed tensors against those of plain ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_dtensor import DTensor, distribute_tensor, emulate

from .rule_checks import check, sent_bytes


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    torch.manual_seed(0)
    with emulate(4):
        yield


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


REDUCTIONS = ("none", "mean", "sum")
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5),
    "huber": lambda x, y, reduction: F.huber_loss(x, y, reduction=reduction, delta=0.7),
    "bce with logits": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
        x, y.sigmoid(), reduction=reduction
    ),
    "bce": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid(), y.sigmoid(), reduction=reduction
    ),
    "weighted bce": lambda x, y, reduction: F.binary_cross_entropy(
        x.sigmoid(), y.detach().sigmoid(), weight=y.detach().exp()[0], reduction=reduction
    ),
    "soft margin": lambda x, y, reduction: F.soft_margin_loss(
        x, y.detach().sign(), reduction=reduction
    ),
    "kl": lambda x, y, reduction: F.kl_div(
        x, y.sigmoid(), reduction=reduction.replace("mean", "batchmean")
    ),
    "poisson": lambda x, y, reduction: F.poisson_nll_loss(x, y.exp(), reduction=reduction),
    "gaussian": lambda x, y, reduction: F.gaussian_nll_loss(x, y, y.exp(), reduction=reduction),
    "hinge": lambda x, y, reduction: F.hinge_embedding_loss(
        x, y.detach().sign(), reduction=reduction
    ),
    "cosine": lambda x, y, reduction: F.cosine_embedding_loss(
        x, y, y.detach()[:, 0].sign(), reduction=reduction
    ),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_losses_of_elements_are_those_of_one_device(name: str) -> None:
    function = ELEMENTWISE[name]
    for reduction in REDUCTIONS:
        check(
            lambda x, y, reduction=reduction: function(x, y, reduction=reduction),
            values(6, 5), values(6, 5), gathers=name in ("gaussian", "hinge", "cosine"),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["multi margin", "multilabel margin"])
def test_losses_of_rows_are_those_of_one_device(name: str) -> None:
    target = torch.randint(0, 5, (6,))
    labels = torch.tensor([[0, 3, -1, 1, 2]] * 6)
    for reduction in REDUCTIONS:
        if name == "multi margin":
            weight = torch.rand(5, dtype=torch.float64)
            check(
                lambda x, y, w, r=reduction: F.multi_margin_loss(x, y, weight=w, reduction=r),
                values(6, 5), target, weight,
            )  # fmt: skip
        else:
            check(
                lambda x, y, r=reduction: F.multilabel_margin_loss(x, y, reduction=r),
                values(6, 5), labels,
            )  # fmt: skip


TARGETS = {
    (6, 8): torch.tensor([7, 0, -100, 3, 5, -100]),
    (8,): torch.tensor(3),
    (4, 6, 3): torch.randint(0, 6, (4, 3)),
    (3, 6, 2, 5): torch.randint(0, 6, (3, 2, 5)),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_that_of_one_device(reduction: str, *, weighted: bool) -> None:
    for shape, target in TARGETS.items():
        weight = torch.rand(shape[1 if len(shape) > 1 else 0], dtype=torch.float64)
        if weighted:
            check(
                lambda x, y, w: F.cross_entropy(x, y, w, reduction=reduction),
                values(*shape), target, weight,
            )  # fmt: skip
        else:
            check(lambda x, y: F.cross_entropy(x, y, reduction=reduction), values(*shape), target)


def test_smoothed_and_soft_targets() -> None:
    target = TARGETS[6, 8]
    check(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), values(6, 8), target,
          gathers=True)  # fmt: skip
    check(lambda x, y: F.cross_entropy(x, y.softmax(1)), values(6, 8), values(6, 8))


def test_mean_over_targets_that_are_all_ignored_is_no_number() -> None:
    target = torch.full((6,), -100)
    check(lambda x, y: F.cross_entropy(x, y), values(6, 8).detach(), target)


def test_targets_out_of_range_are_refused() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(6, 8), mesh, (Shard(1),))
    y = distribute_tensor(torch.tensor([0, 1, 8, 2, 3, 4]), mesh, (Replicate(),))
    with pytest.raises(IndexError, match="Target 8 is out of bounds"):
        F.cross_entropy(x, y)


def test_cross_entropy_over_a_cut_vocabulary_moves_no_logits() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.randn(64, 512, requires_grad=True)
    y = torch.randint(0, 512, (64,))
    parts = distribute_tensor(x, mesh, (Shard(0), Shard(1)))
    targets = distribute_tensor(y, mesh, (Shard(0), Replicate()))
    rows = 32 * 4

    def step() -> None:
        loss = F.cross_entropy(parts, targets)
        loss.backward()
        assert torch.allclose(loss, F.cross_entropy(x, y))

    # A maximum, a sum and a gradient's sum per row, and a few scalars.
    assert sent_bytes(step) <= 2 * 3 * rows + 256
    assert parts.grad is not None
    assert parts.grad.placements == (Shard(0), Shard(1))  # pyright: ignore[reportAttributeAccessIssue]: a DTensor


class WithoutData(TorchDispatchMode):
    """Notes the operators that run on tensors without data.

    Attributes:
        names: Theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # the operators that it is made of come here
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type == "meta":
            self.names.append(func.name())
        return result


def test_a_second_cross_entropy_over_a_cut_vocabulary_finds_out_nothing_again() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(6, 8, requires_grad=True), mesh, (Shard(1),))
    torch.autograd.grad(F.cross_entropy(x, TARGETS[6, 8]), x)
    with WithoutData() as found:
        torch.autograd.grad(F.cross_entropy(x, TARGETS[6, 8]), x)
    assert not found.names


def test_losses_move_scalars_only() -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.randn(64, 32, requires_grad=True), mesh, (Shard(0),))
    y = distribute_tensor(torch.randn(64, 32), mesh, (Shard(0),))
    assert sent_bytes(lambda: F.mse_loss(x, y).backward()) == 0
    t = distribute_tensor(torch.randint(0, 32, (64,)), mesh, (Shard(0),))
    assert sent_bytes(lambda: F.cross_entropy(x, t).backward()) <= 64
