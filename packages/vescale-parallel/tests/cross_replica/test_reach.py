"""What a comparison of a model on slices says of other lengths, flags and blocks than it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.context.guard import ContextGuard
from vescale_parallel._cross_replica.context.leaving import part_of_whole
from vescale_parallel._cross_replica.context.proof import proven_slicing
from vescale_parallel._cross_replica.context.reach.all_blocks import of_all_blocks
from vescale_parallel._cross_replica.context.slices import SequenceSlices
from vescale_parallel._cross_replica.context.slicing import Slicing

from .test_context import Block, Model, draws_by, ids, model_with


def proven(model: nn.Module) -> Slicing:
    return proven_slicing(model, {"ids": ids()}, 2, draws_by=draws_by, training=True)


class Long(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True).expand_as(x) if x.shape[1] > 64 else x


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.size(1) % 7 else x


class Least(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / min(64, x.shape[1] - 1)


class Same(nn.Module):
    """Asks what is the same of every slice."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        assert length > 1
        assert x.abs().shape == (*x.shape[:1], length, x.shape[2])
        return x.view(-1, length, x.shape[-1]) * 2


@pytest.mark.parametrize("beside", [Long, Odd, Least])
def test_modules_that_compare_the_length_see_that_of_one_device(beside: type[nn.Module]) -> None:
    assert proven(model_with(beside)).shown.modules >= {"blocks.0.beside", "blocks.1.beside"}


def test_modules_that_ask_for_what_every_slice_has_are_given_slices() -> None:
    assert not proven(model_with(Same)).shown.modules


class Headed(Model):
    """A head that is another one for long sequences."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(nn.Identity()))
        self.head = nn.Sequential(Long(), self.head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x).logsumexp(-1).mean()


def test_modules_behind_blocks_that_compare_the_length_get_all_of_it() -> None:
    assert proven(Headed()).behind.modules == {"head": False}


class Flagged(nn.Module):
    adds = False

    def forward(self, x: Tensor) -> Tensor:
        return x + x.cumsum(1) if self.adds else x


@pytest.mark.parametrize("flag", ["adds", "training"])
def test_calls_with_other_flags_are_compared_again(flag: str) -> None:
    model = model_with(Flagged)
    guard = ContextGuard(model, 2, ids(), draws_by)
    guard._slicing((ids(),), {})
    assert len(guard._known) == 1
    for block in model.blocks:
        setattr(block.beside, flag, flag == "adds")
    if flag == "adds":
        with pytest.raises(ValueError, match=r"blocks\.0.*returns something else"):
            guard._slicing((ids(),), {})
    else:
        guard._slicing((ids(),), {})
        assert len(guard._known) == 2


class Normed(Block):
    """Positions that a block adds before a layer of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        return super().forward(self.norm(x + place * torch.arange(8)))


def test_blocks_around_the_module_that_differs_are_shown_whole_sequences() -> None:
    assert proven(Model(Normed)).shown.modules >= {"blocks.0", "blocks.1"}


class Growing(Block):
    """A table of positions that is kept, and grows."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.length = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.length < q.shape[2]:
            self.length = q.shape[2]
            self.table = torch.arange(self.length, dtype=q.dtype)[:, None].cos()
        q, k = (x * self.table[: q.shape[2]] for x in (q, k))
        return (q @ k.mT).softmax(-1) @ v


def test_tables_that_are_kept_by_length_are_whole() -> None:
    found = proven(Model(Growing))
    assert found.shown.modules == {"blocks.0", "blocks.1"}
    assert not found.written


def test_tensors_along_the_sequence_that_no_comparison_saw_are_refused() -> None:
    slicing, mask = Slicing(), torch.ones(2, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="which it was not given when the model was compared"):
        slicing.dim("blocks.0", 1, mask, 9, is_compared=False)
    assert slicing.dim("blocks.0", 1, mask, 9) == 1
    assert slicing.dim("blocks.0", 1, mask, 9, is_compared=False) == 1


class Repeating(Model):
    num_passes = 1

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(self.num_passes):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def test_lists_that_run_twice_have_parts_of_gradients_between() -> None:
    model = Repeating(lambda: Block(nn.Identity()))
    assert proven(model).last == "blocks"
    model.num_passes = 2
    assert proven(model).last is None


class Deeper(Model):
    def __init__(self, kinds: list[Callable[[], Any]]) -> None:
        super().__init__(kinds[0])
        self.blocks = nn.ModuleList(make() for make in kinds)


def plain() -> Block:
    return Block(nn.Identity())


def long() -> Block:
    return Block(Long())


def test_what_is_known_of_few_blocks_holds_for_all_of_their_kind() -> None:
    few, more = Deeper([plain, long]), Deeper([plain, long, plain, long, long])
    found = of_all_blocks(proven(few), few, more)
    assert found.attending == {f"blocks.{at}" for at in range(5)}
    assert found.shown.modules == {"blocks.1.beside", "blocks.3.beside", "blocks.4.beside"}


def test_blocks_of_a_kind_that_was_not_compared_are_refused() -> None:
    few = Deeper([plain, plain])
    with pytest.raises(ValueError, match=r"'blocks\.1' is of a kind that the smaller model"):
        of_all_blocks(proven(few), few, Deeper([plain, long]))


def test_rows_and_positions_in_one_dim_are_known_of_a_call_with_one_row() -> None:
    slices = SequenceSlices.over(9, 2, "all_to_all")
    of_one_row = part_of_whole((9, 4), torch.ones(5, 4), slices, 0, "router")
    assert of_one_row == part_of_whole((27, 4), torch.ones(15, 4), slices, 0, "router")


class Padded(Model):
    """Rows of padding attend to nothing, and are none of the numbers that count."""

    def __init__(self) -> None:
        super().__init__(lambda: Masked(nn.Identity()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.masked_fill(x.isnan(), 0) if self.training else x


class Masked(Block):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        hidden[:2] = True
        return (q @ k.mT).masked_fill(hidden, float("-inf")).softmax(-1) @ v


def test_gradients_that_are_no_numbers_are_told() -> None:
    with pytest.raises(ValueError, match="is not finite on one device"):
        proven(Padded())
