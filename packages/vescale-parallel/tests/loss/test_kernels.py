"""Means over targets are heard of inside of blocks, where the mode that counts them is left."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vescale_parallel._loss.kernels import innermost, leave_in_blocks
from vescale_parallel._loss.token_mean import TokenMeans
from vescale_parallel._torch_private import current_function_mode, loss_kernels

cross_entropy = F.cross_entropy  # as a module has it that imports the function
WEIGHT = torch.tensor([0.5, 2.0, 1.0])
LOGITS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 0.0], [0.0, 0.5, 0.0]])
TARGETS = torch.tensor([0, -100, 2])


class Block(nn.Module):
    """Computes a loss beside what it returns, if asked for it."""

    def __init__(self, loss: Any = None) -> None:
        super().__init__()
        self.linear, self.loss, self.aux = nn.Linear(3, 3), loss, torch.zeros(())
        self.mode: object = None

    def forward(self, x: Tensor) -> Tensor:
        self.mode = current_function_mode()
        if self.loss is not None:
            self.aux = self.loss(x, TARGETS)
        return x


class Net(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.block = Block(loss)
        leave_in_blocks(self, ["block"])

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.block(x), TARGETS) + self.block.aux


class OwnLoss(torch.autograd.Function):
    """Computes its loss in forward itself, as fused ones do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            loss = cross_entropy(inner, y)
            ctx.save_for_backward(*torch.autograd.grad(loss, inner))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * ctx.saved_tensors[0], None


LOSSES = {
    "function": F.cross_entropy,
    "imported": lambda x, y: cross_entropy(x, y),
    "module": nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1),
    "nll": lambda x, y: F.nll_loss(x.log_softmax(-1), y, WEIGHT),
    "autograd function": OwnLoss.apply,
    "kernel": lambda x, y: loss_kernels.cross_entropy_loss(x, y),
    "ignore": lambda x, y: F.cross_entropy(x, y.clamp(min=0), ignore_index=0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_blocks_are_those_of_the_mode_outside(name: str) -> None:
    counts: list[Tensor] = []

    def denominator(_: int, count: Tensor) -> Tensor:
        counts.append(count)
        return count + 3

    found: list[tuple[Tensor, Tensor]] = []
    for has_blocks in (False, True):
        x = LOGITS.clone().requires_grad_()
        net = Net(LOSSES[name])
        if not has_blocks:
            net.block._forward_pre_hooks.clear()
        with TokenMeans(2, denominator) as means:
            loss = net(x)
            assert len(means.means) == 2
            assert (net.block.mode is means) is not has_blocks
        found.append((loss.detach(), torch.autograd.grad(loss, x)[0]))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert torch.equal(counts[0], counts[2])


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.cross_entropy(x, y, reduction="sum"),
        lambda x, y: F.cross_entropy(x, y, reduction="none")[0],
        lambda x, y: F.cross_entropy(x, x.detach().softmax(-1)),
        lambda x, y: F.mse_loss(x, x.detach() + 1),
    ],
)
def test_other_losses_in_blocks_are_left_alone(loss: Any) -> None:
    x, net = LOGITS.clone().requires_grad_(), Net(loss)
    with TokenMeans(2, lambda index, count: count * 5) as means:
        net(x)
    assert torch.equal(net.block.aux, loss(x, TARGETS))
    assert len(means.means) == 1


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("old", [{"size_average": False}, {"reduce": False}, {"reduce": True}])
def test_reductions_are_also_said_as_long_ago(old: dict[str, bool]) -> None:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, **old)  # pyright: ignore[reportArgumentType, reportCallIssue]

    factor = 2 if old == {"reduce": True} else 1
    expected = loss(LOGITS, TARGETS) * factor
    with TokenMeans(2, lambda index, count: count):
        assert torch.equal(loss(LOGITS, TARGETS), expected)


def test_a_model_that_is_called_in_another_one_counts_its_own() -> None:
    with TokenMeans(2, lambda index, count: count) as outer:
        with TokenMeans(4, lambda index, count: count) as inner:
            Net(F.cross_entropy)(LOGITS)
        assert (len(inner.means), len(outer.means)) == (2, 0)
        F.cross_entropy(LOGITS, TARGETS)
        assert len(outer.means) == 1
        assert current_function_mode() is outer


def test_a_block_that_raises_leaves_everything_as_it_was() -> None:
    kernel = loss_kernels.cross_entropy_loss

    class Stop(BaseException):
        pass

    def stop(*_: Any) -> Tensor:
        raise Stop

    for error in (Stop, IndexError):
        with (
            pytest.raises(error),
            TokenMeans(2, lambda index, count: count),
        ):
            Net(stop if error is Stop else lambda x, y: [][0])(LOGITS)
        assert current_function_mode() is None
        assert innermost() is None
        assert loss_kernels.cross_entropy_loss is kernel


def test_the_mode_goes_on_behind_a_block_that_raised() -> None:
    net = Net(lambda x, y: [][0])
    with TokenMeans(2, lambda index, count: count) as means:
        with pytest.raises(IndexError):
            net(LOGITS)
        assert current_function_mode() is means


def test_a_mode_of_the_model_above_stays_above() -> None:
    class Above(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with TokenMeans(2, lambda index, count: count) as means:
        with Above() as above:
            Net(F.cross_entropy)(LOGITS)
            assert current_function_mode() is above
        assert len(means.means) == 2
        assert current_function_mode() is means


def test_another_thread_computes_its_own_losses() -> None:
    expected, found = F.cross_entropy(LOGITS, TARGETS), list[Tensor]()
    with TokenMeans(2, lambda index, count: count):
        thread = threading.Thread(target=lambda: found.append(F.cross_entropy(LOGITS, TARGETS)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], expected)


@pytest.mark.slow
def test_a_compiled_loss_is_counted_outside_of_blocks_and_refused_inside() -> None:
    @torch.compile(backend="aot_eager")
    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x * 2, y)

    expected = F.cross_entropy(LOGITS * 2, TARGETS) * 2
    with TokenMeans(2, lambda index, count: count):
        assert torch.equal(loss(LOGITS, TARGETS), expected)
        with pytest.raises(Exception, match="Compile the block"):
            Net(loss)(LOGITS)


@pytest.mark.slow
def test_compiled_blocks_keep_the_mode() -> None:
    net = Net(F.cross_entropy)
    expected = F.cross_entropy(LOGITS, TARGETS) * 2
    net.block.compile(backend="aot_eager")
    with TokenMeans(2, lambda index, count: count):
        net(LOGITS)
    assert torch.equal(net.block.aux, expected)
