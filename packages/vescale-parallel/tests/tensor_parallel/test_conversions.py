"""Activations that cross the border of a region: who has what, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._tensor_parallel.chunks import part_sizes
from vescale_parallel._tensor_parallel.communicators import FakeRanks, ThreadExchange, ThreadRanks
from vescale_parallel._tensor_parallel.conversions import Boundary
from vescale_parallel._verify.threads import run_in_threads

LENGTH = 5  # over two ranks 3 and 2


def test_a_tensor_that_several_layers_read_enters_once() -> None:
    boundary = Boundary(FakeRanks(2))
    x_BSF = torch.randn(2, 4, 3, requires_grad=True)
    entered = boundary.enter(x_BSF, None, "blocks")
    assert boundary.enter(x_BSF, None, "blocks") is entered
    assert boundary.enter(x_BSF.clone(), None, "blocks") is not entered
    entered = boundary.enter(x_BSF, None, "blocks")
    boundary.leave(entered, None, "blocks")
    assert boundary.enter(x_BSF, None, "blocks") is not entered


def test_a_tensor_that_was_written_to_enters_again() -> None:
    boundary = Boundary(FakeRanks(2))
    x_BSF = torch.randn(2, 4, 3)
    entered = boundary.enter(x_BSF, 1, "blocks")
    x_BSF.add_(1)
    assert boundary.enter(x_BSF, 1, "blocks") is not entered


def crossed(rank: int, threads: ThreadExchange, whole_BSF: Tensor) -> tuple[Tensor, Tensor]:
    """Cut, gather, scale by the rank, sum and cut, gather: the sum of all scales."""
    boundary = Boundary(ThreadRanks(threads, rank))
    x_BSF = whole_BSF.clone().requires_grad_()
    part_BSF = boundary.split(x_BSF, 1, "blocks")
    assert part_BSF.shape[1] == part_sizes(LENGTH, 2)[rank]
    inside_BSF = boundary.enter(part_BSF, 1, "blocks")
    assert torch.equal(inside_BSF, whole_BSF)
    left_BSF = boundary.leave(inside_BSF * (rank + 1), 1, "blocks")
    y_BSF = boundary.gather(left_BSF, 1, "blocks")
    (y_BSF * whole_BSF).sum().backward()
    assert x_BSF.grad is not None
    return y_BSF.detach(), x_BSF.grad


def test_uneven_sequences_come_back_whole_with_the_gradients_of_one_device() -> None:
    whole_BSF = torch.randn(2, LENGTH, 3, dtype=torch.float64)
    for y_BSF, grad_BSF in run_in_threads(2, lambda r, m: crossed(r, m, whole_BSF)):
        assert torch.equal(y_BSF, whole_BSF * 1 + whole_BSF * 2)
        assert torch.equal(grad_BSF, whole_BSF * 1 + whole_BSF * 2)


class AtOnce:
    """Runs collectives where they are started, and says in which order."""

    def __init__(self, ranks: ThreadRanks) -> None:
        self.ranks = ranks
        self.said: list[str] = []

    def start(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
        result, number = run(x), len(self.said)
        self.said.append(f"start {number}")

        def wait() -> Tensor:
            self.said.append(f"wait {number}")
            return result

        return wait


def layer_in_parts(
    rank: int, threads: ThreadExchange, x_BSF: Tensor, dim: int | None, num_parts: int
) -> tuple[Tensor, Tensor, Tensor, list[str]]:
    """Return what a row-cut layer gives, its gradients, and what was started when."""
    ranks = ThreadRanks(threads, rank)
    beside = AtOnce(ranks)
    boundary = Boundary(ranks, beside=beside, num_parts=num_parts)
    own = x_BSF.chunk(2, -1)[rank].clone().requires_grad_()
    weight = WEIGHT.chunk(2, 1)[rank].clone().requires_grad_()
    total = boundary.leave_layer(lambda x: x @ weight.mT, own, dim, "blocks")
    cotangent = COTANGENT if dim is None else COTANGENT.chunk(2, dim)[rank]
    total.backward(cotangent)
    assert own.grad is not None
    assert weight.grad is not None
    return total.detach(), own.grad, weight.grad, beside.said


X, COTANGENT = torch.randn(2, 2, 6, 4, dtype=torch.float64)
WEIGHT = torch.randn(4, 4, dtype=torch.float64)


@pytest.mark.parametrize("num_parts", [2, 3, 4])
@pytest.mark.parametrize("dim", [None, 1, 0])
def test_a_sum_in_parts_is_that_of_the_whole(dim: int | None, num_parts: int) -> None:
    x, weight = X.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    y = x @ weight.mT
    y.backward(COTANGENT)
    assert x.grad is not None
    assert weight.grad is not None
    runs = run_in_threads(2, lambda r, m: layer_in_parts(r, m, X, dim, num_parts))
    for rank, (total, grad_x, grad_weight, _) in enumerate(runs):
        expected = y.detach() if dim is None else y.detach().chunk(2, dim)[rank]
        # float64 of order 1; products over parts may be summed in another order.
        torch.testing.assert_close(total, expected, rtol=0, atol=1e-13)
        torch.testing.assert_close(grad_x, x.grad.chunk(2, -1)[rank], rtol=0, atol=1e-13)
        torch.testing.assert_close(grad_weight, weight.grad.chunk(2, 1)[rank], rtol=0, atol=1e-12)


def test_parts_are_sent_before_the_first_is_waited_for_in_both_directions() -> None:
    forward = ["start 0", "start 1", "start 2", "wait 0", "wait 1", "wait 2"]
    # The last part first: that is the order in which autograd comes to the layers.
    backward = ["start 6", "start 7", "start 8", "wait 6", "wait 7", "wait 8"]
    for *_, said in run_in_threads(2, lambda r, m: layer_in_parts(r, m, X, 1, 3)):
        assert said == forward + backward


def test_positions_that_do_not_divide_into_ranks_are_summed_at_once() -> None:
    def run(rank: int, threads: ThreadExchange) -> list[str]:
        beside = AtOnce(ThreadRanks(threads, rank))
        boundary = Boundary(beside.ranks, beside=beside, num_parts=2)
        left = boundary.leave_layer(lambda x: x, torch.ones(2, LENGTH, 3), 1, "blocks")
        assert left.shape[1] == part_sizes(LENGTH, 2)[rank]
        return beside.said

    assert run_in_threads(2, run) == [[], []]


def test_a_pipeline_needs_sequences_that_divide() -> None:
    boundary = Boundary(FakeRanks(2), even=True)
    with pytest.raises(ValueError, match="got 5; the nearest are 4 and 6"):
        boundary.split(torch.zeros(1, LENGTH, 2), 1, "blocks")
    assert boundary.split(torch.zeros(1, 4, 2), 1, "blocks").shape == (1, 2, 2)


def test_a_rank_that_fails_stops_the_others() -> None:
    def fails(rank: int, threads: ThreadExchange) -> None:
        if rank:
            raise RuntimeError("rank 1 gave up")
        ThreadRanks(threads, rank).all_reduce(torch.zeros(()))

    with pytest.raises(RuntimeError, match="rank 1 gave up"):
        run_in_threads(2, fails)


class Stack(nn.Module):
    """Blocks of which a call may skip some; the first cuts the sequence, the last gathers it."""

    def __init__(self, boundary: Boundary) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), nn.Identity(), nn.Identity()])
        first, middle, last = self.blocks
        first.register_forward_pre_hook(lambda _, args: boundary.split(args[0], 1, "blocks"))
        middle.register_forward_hook(lambda _, args, y: boundary.enter(y, 1, "blocks")[:, :2])
        last.register_forward_pre_hook(lambda _, args: boundary.gather(args[0], 1, "blocks"))
        boundary.watch(self, {"blocks": ("blocks.0", "blocks.2")})

    def forward(self, x_BSF: Tensor, called: tuple[int, ...] = (0, 1, 2)) -> Tensor:
        for index in called:
            x_BSF = self.blocks[index](x_BSF)
        return x_BSF


def test_a_call_that_skips_where_a_sequence_is_cut_or_gathered_is_refused() -> None:
    stack, x_BSF = Stack(Boundary(FakeRanks(2))), torch.randn(2, 4, 3)
    assert stack(x_BSF).shape == x_BSF.shape
    assert stack(x_BSF, (0, 2)).shape == x_BSF.shape
    # Also of half the tokens, as many as the part of the call before had.
    for given in (x_BSF, x_BSF[:, :2]):
        for called in ((1, 2), (2,)):
            with pytest.raises(ValueError, match=r"'blocks\.0' should have sharded in this call"):
                stack(given, called)
    with pytest.raises(ValueError, match=r"'blocks\.0' sharded is gathered by 'blocks\.2'"):
        stack(x_BSF, (0, 1))
    assert stack(x_BSF).shape == x_BSF.shape
