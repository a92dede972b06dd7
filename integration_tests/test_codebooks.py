"""Codebooks whose running sums forward writes, with gradients at hand or not: one device's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, ZERO, Constraints
from .programs import WIDTH, Plain, Program, Run, both, right
from .test_bad_input import check

DATA: Constraints = {DP: 2}


class Codebook(nn.Module):
    """Codes that follow what is quantized by them, as vector-quantize-pytorch and VQ-VAEs do."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, follow: Callable[[Codebook, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.follow = follow
        codes = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(x.detach(), self.codes).argmin(-1)
        found = F.embedding(chosen, self.codes)
        if self.training:
            self.follow(self, x, F.one_hot(chosen, len(self.codes)).to(x.dtype))
        return x + (found - x).detach(), F.mse_loss(found.detach(), x)


def by_data(book: Codebook, x: Tensor, of: Tensor) -> None:
    book.counts.data.lerp_(of.sum(0), 0.2)
    book.sums.data.lerp_(of.t() @ x, 0.2)  # which has a gradient
    book.codes.data.copy_(book.sums / (book.counts[:, None] + 1e-5))


def by_data_in_steps(book: Codebook, x: Tensor, of: Tensor) -> None:
    book.counts.data.mul_(0.8).add_(of.sum(0), alpha=0.2)
    book.sums.data.mul_(0.8).add_(of.t() @ x, alpha=0.2)
    book.codes.data.copy_(book.sums / (book.counts[:, None] + 1e-5))


def by_detached(book: Codebook, x: Tensor, of: Tensor) -> None:
    book.counts.detach().lerp_(of.sum(0), 0.2)
    book.sums.detach().lerp_(of.t() @ x, 0.2)
    book.codes.detach().copy_(book.sums / (book.counts[:, None] + 1e-5))


def with_dead_codes(book: Codebook, x: Tensor, of: Tensor) -> None:
    """Likewise, and puts rows of the batch in the place of codes that are hardly chosen."""
    by_data(book, x, of)
    dead = book.counts < 0.9
    if torch.any(dead):
        number = int(dead.sum().item())
        rows = x[torch.randperm(x.shape[0])[:number]]
        book.codes.data[dead] = rows
        book.counts.data[dead] = 1.0
        book.sums.data[dead] = rows


def set_anew(book: Codebook, x: Tensor, of: Tensor) -> None:
    book.counts.data = book.counts * 0.8 + of.sum(0) * 0.2
    book.sums.data = book.sums * 0.8 + (of.t() @ x).detach() * 0.2
    book.codes.data = book.sums / (book.counts[:, None] + 1e-5)


class Quantized(Plain):
    def __init__(self, follow: Callable[[Codebook, Tensor, Tensor], None]) -> None:
        super().__init__()
        self.codebook = Codebook(follow)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, commitment = self.codebook(self.embed(batch["x"]))
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), batch["y"]) + 0.25 * commitment


def trained(follow: Callable[[Codebook, Tensor, Tensor], None]) -> Program:
    def train(run: Run) -> None:
        model = Quantized(follow)
        run.train(model)
        for buffer in model.buffers():
            run.keep(buffer)

    return train


def follow_data(run: Run) -> None:
    trained(by_data)(run)


def follow_data_in_steps(run: Run) -> None:
    trained(by_data_in_steps)(run)


def follow_detached(run: Run) -> None:
    trained(by_detached)(run)


def follow_with_dead_codes(run: Run) -> None:
    trained(with_dead_codes)(run)


def follow_set_anew(run: Run) -> None:
    trained(set_anew)(run)


@pytest.mark.by_day("follow_detached", "follow_with_dead_codes")
@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        follow_data,
        follow_data_in_steps,
        follow_detached,
        follow_with_dead_codes,
        follow_set_anew,
    ],
)
def test_codes_follow_the_rows_of_all_ranks(world2: World, program: Program) -> None:
    right(world2, program, DATA)


@pytest.mark.slow
def test_codes_follow_beside_sharded_parameters(world2: World) -> None:
    right(world2, follow_data, {DP: 2, ZERO: 3})


def read_after_the_write(book: Codebook, x: Tensor, of: Tensor) -> None:
    """Keeps the tensor that it wrote to, which has a gradient on one device."""
    sums = book.sums.data
    sums.lerp_(of.t() @ x, 0.2)
    book.latest = sums.sum()


def follow_and_read(run: Run) -> None:
    trained(read_after_the_write)(run)


@pytest.mark.slow
def test_a_gradient_that_would_be_lost_is_refused(world2: World) -> None:
    message = "which would lose its gradient; make the tensor with"
    check(world2, ValueError, message, both, follow_and_read, DATA)
