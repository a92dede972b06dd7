"""Buffers that forward changes under a pipeline: one device's on all ranks, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, PARTS, PP, SCHEDULE, VIRTUAL, ZERO, Constraints
from .programs import WIDTH, Block, Plain, Run, right, rows
from .short_group import in_short_group
from .test_bad_input import check

PLAIN: Constraints = {PP: 2, PARTS: 2}
INTERLEAVED: Constraints = {PP: 2, PARTS: 2, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2}
ZBV: Constraints = {PP: 2, PARTS: 2, SCHEDULE: "zbv", VIRTUAL: 2}


class Counter(nn.Module):
    """Counts its calls; it has no parameters, so that every stage runs it."""

    count: Tensor

    def __init__(self, *, in_place: bool, persistent: bool = True) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.count += 1
        else:
            self.count = self.count + 1
        return x * (1 + 0.01 * self.count)


class CountingBlock(Block):
    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.counter(x))


class InBlocks(Plain):
    """Every block counts, by itself or with one counter for all."""

    def __init__(
        self, *, in_place: bool = False, persistent: bool = True, shared: bool = False
    ) -> None:
        super().__init__()
        counters = [Counter(in_place=in_place, persistent=persistent) for _ in range(4)]
        if shared:
            counters = [counters[0]] * 4
        self.blocks = nn.ModuleList(map(CountingBlock, counters))


class ReadBefore(InBlocks):
    """Code before the blocks reads what the last block counts behind it."""

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        last = self.blocks[3].get_submodule("counter").get_buffer("count")
        return super().logits({**batch, "x": batch["x"] * (1 + last)})


class BetweenBlocks(Plain):
    """One counter is called before every block, on all stages."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.counter = Counter(in_place=in_place)

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        for block in self.blocks:
            x = block(self.counter(x))
        return self.head(x)


class CountingEmbedding(nn.Linear):
    count: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.count += 1
        return super().forward(x)


class ReadBehind(Plain):
    """The last stage reads what the embedding of the first one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = CountingEmbedding()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return F.mse_loss(self.logits(batch) * self.embed.get_buffer("count"), batch["y"])


MODELS = {
    "reassigned": InBlocks,
    "reassigned-not-persistent": partial(InBlocks, persistent=False),
    "read-before": ReadBefore,
    "between-blocks": partial(BetweenBlocks, in_place=True),
    "between-blocks-reassigned": partial(BetweenBlocks, in_place=False),
    "read-behind": ReadBehind,
    "shared-in-place": partial(InBlocks, shared=True, in_place=True),
}
CASES = [
    ("reassigned", PLAIN),
    ("reassigned", INTERLEAVED),
    ("reassigned", {**PLAIN, "recompute": "full"}),
    ("reassigned-not-persistent", ZBV),
    ("read-before", PLAIN),
    ("between-blocks", INTERLEAVED),
    ("between-blocks-reassigned", PLAIN),
]


def trained(name: str, run: Run) -> None:
    """Train and evaluate; keep losses, and all buffers after every call."""
    model, optimizer = run.start(MODELS[name]())
    for step, batch in enumerate(rows(4)):
        loss = model(run.part(batch))
        (loss / 2).backward()
        if step % 2:  # gradients of two calls are added
            optimizer.step()
            optimizer.zero_grad()
        run.keep(loss)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                run.keep(model(run.part(batch)))
        for _, buffer in sorted(model.named_buffers()):
            run.keep(buffer)
    for _, value in sorted(model.state_dict().items()):
        run.keep(value)
    run.finish(model)


@pytest.mark.by_day("between-blocks-reassigned-constraints6")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "constraints"), CASES)
def test_every_rank_has_the_buffers_of_one_device(
    world2: World, name: str, constraints: Constraints
) -> None:
    right(world2, partial(trained, name), constraints)


@pytest.mark.by_day("2-between-blocks")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "name"), [(1, "reassigned"), (2, "between-blocks"), (3, "reassigned")]
)
def test_data_parallel_ranks_too(world4: World, zero: int, name: str) -> None:
    right(world4, partial(trained, name), {**PLAIN, DP: 2, ZERO: zero})


def once(name: str) -> None:
    trained(name, Run(PLAIN))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "buffer"),
    [("read-behind", "embed.count"), ("shared-in-place", "blocks.0.counter.count")],
)
def test_a_buffer_of_an_earlier_stage_is_refused(
    world2: World, tmp_path: Path, name: str, buffer: str
) -> None:
    message = (
        f"the buffer {buffer!r} is changed by a module of stage 0 of the pipeline and used on"
    )
    check(world2, ValueError, message, in_short_group, str(tmp_path), partial(once, name))
    world2.close()
