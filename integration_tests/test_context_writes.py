"""What blocks write on slices of sequences, in buffers and attributes, is one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from .contexts import Block, ByHand, batch_of, rows_of
from .families import InDouble
from .plans import CP, DP, PARTS, PP, ZERO, Constraints, make_plan

EXPERTS = 4
KINDS = ["added", "new", "mean", "replaced", "scores", "flat_scores", "loss"]


class Router(nn.Module):
    """Chooses experts, and keeps something of all tokens in one of several ways."""

    counts: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.kept = kind, None
        self.gate = nn.Linear(32, EXPERTS)
        of = torch.int64 if kind == "added" else torch.float64
        self.register_buffer("counts", torch.zeros(EXPERTS, dtype=of))

    def forward(self, x_BSF: Tensor) -> Tensor:
        logits = self.gate(x_BSF)
        scores = logits.softmax(-1)
        counts = F.one_hot(scores.argmax(-1), EXPERTS).sum((0, 1))
        match self.kind:
            case "added":
                self.counts += counts
            case "new":
                self.counts = self.counts + counts
            case "mean":
                self.counts.mul_(0.9).add_(scores.detach().mean((0, 1)), alpha=0.1)
            case "replaced":
                self.counts.copy_(counts)
            case "scores":
                self.kept = scores.detach()
            case "flat_scores":
                self.kept = scores.detach().flatten(0, 1)
            case "loss":
                self.kept = logits.logsumexp(-1).square().mean()
            case "variance":
                self.counts.copy_(scores.detach().var((0, 1)))
            case "read":
                self.counts += counts
                x_BSF = x_BSF * (1 + self.counts.sum() / 100)
            case "balance":
                self.kept = (scores.mean((0, 1)) * counts).sum()
            case _:
                raise ValueError(self.kind)
        return x_BSF * scores.amax(-1, keepdim=True)


class RoutedBlock(Block):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.router = Router(kind)

    def forward(self, x_BSF: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        return self.router(super().forward(x_BSF, cos_SD, sin_SD))


def written(kind: str, plan: Constraints | None) -> list[Tensor]:
    """Return losses of some steps, and what routers keep behind each; the loop adds their loss."""
    torch.manual_seed(0)
    model: Any = ByHand()
    model.blocks = nn.ModuleList(RoutedBlock(kind) for _ in range(2))
    model = model.double()
    routers: list[Any] = [block.router for block in model.blocks]
    if plan is None:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    else:
        model, optimizer = vescale.parallelize(
            make_plan(plan), model, lambda m: torch.optim.SGD(m.parameters(), 0.1)
        )
    found = list[Tensor]()
    for step in range(2):
        with InDouble():
            loss = model(**rows_of(model, batch_of(step, 12 + step, "")))
            if kind == "loss":
                loss = loss + sum(router.kept for router in routers)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), *(router.counts.clone() for router in routers)]
        found += [router.kept.detach() for router in routers if router.kept is not None]
        if kind in COUNTED:  # an evaluation between steps, which counts as well
            with InDouble(), torch.no_grad():
                found.append(model.eval()(**rows_of(model, batch_of(step, 12 + step, ""))))
            found += [router.counts.clone() for router in routers]
            model.train()
    return found


def check(world: World, kinds: list[str], plan: Constraints) -> None:
    for kind in kinds:
        expected = written(kind, None)
        for found in world.run(written, kind, plan):
            for x, whole in zip(found, expected, strict=True):
                # Sums of float64 over the positions of slices, in another order.
                torch.testing.assert_close(x, whole, rtol=1e-12, atol=1e-12, msg=kind)


@pytest.mark.by_day("mean", "replaced", "loss")
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_blocks_write_of_positions_is_that_of_whole_sequences(
    world2: World, kind: str
) -> None:
    check(world2, [kind], {CP: 2, ZERO: 3})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_writes_what_one_device_does(world3: World, kind: str) -> None:
    plan = {CP: 3, "context_parallel.method": "ring", "recompute": "full"}
    check(world3, [kind], plan)


@pytest.mark.nightly
def test_stages_on_slices_write_what_one_device_does(world4: World) -> None:
    check(world4, ["added", "mean"], {CP: 2, PP: 2})


COUNTED = ["added", "new"]
IN_PARTS = "batch.gradient_accumulation"


@pytest.mark.by_day("*'data_parallel.size': 2*-added*")
@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize("plan", [{CP: 2, IN_PARTS: 2}, {DP: 2, IN_PARTS: 2}], ids=str)
def test_what_rows_add_to_is_summed_over_micro_batches(
    world2: World, kind: str, plan: Constraints
) -> None:
    check(world2, [kind], plan)


@pytest.mark.slow
@pytest.mark.nightly
def test_what_rows_add_to_is_summed_over_micro_batches_of_stages(world2: World) -> None:
    check(world2, ["added"], {PP: 2, PARTS: 2})


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTED)
def test_what_rows_add_to_is_summed_over_data_ranks_of_slices(world4: World, kind: str) -> None:
    check(world4, [kind], {CP: 2, DP: 2, ZERO: 3})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", COUNTED)
@pytest.mark.parametrize(
    "more",
    [
        {CP: 2, IN_PARTS: 2},
        {CP: 2, ZERO: 3, "recompute": "full"},
        {PP: 2, PARTS: 2},
        {CP: 2, "context_parallel.method": "ring"},
    ],
    ids=str,
)
def test_what_rows_add_to_is_summed_over_all_ranks(
    world4: World, kind: str, more: Constraints
) -> None:
    check(world4, [kind], {DP: 2, **more})


def refused_in_parts(kind: str) -> str:
    with pytest.raises(ValueError, match="rows of the batch depend on each other") as error:
        written(kind, {DP: 2, IN_PARTS: 2})
    return str(error.value)


@pytest.mark.by_day("read")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["read", "replaced", "mean"])
def test_what_is_read_or_replaced_is_not_summed_over_micro_batches(
    world2: World, kind: str
) -> None:
    for said in world2.run(refused_in_parts, kind):
        assert "blocks.0.router" in said


def refused(kind: str) -> str:
    with pytest.raises(ValueError, match="of all positions on one device") as error:
        written(kind, {CP: 2})
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("variance", "counts"), ("balance", "kept")])
def test_what_is_no_sum_over_positions_is_refused_by_name(
    world2: World, kind: str, name: str
) -> None:
    for said in world2.run(refused, kind):
        assert ".router'" in said
        assert f"keeps '{name}'" in said
