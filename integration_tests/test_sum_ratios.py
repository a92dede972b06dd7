"""Means that code writes out as ratios of sums, in micro-batches and pipelines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import RankError, World

from .families import make
from .plans import CP, DP, PARTS, PP, SCHEDULE, TP, VIRTUAL, ZERO, Constraints
from .programs import WIDTH, Block, Run, right

NUM_WORDS, ACCUMULATION = 32, "batch.gradient_accumulation"
ONE: dict[str, Constraints] = {
    "accumulation": {ACCUMULATION: 2},
    "accumulation-recompute": {ACCUMULATION: 4, "recompute": "full"},
    "accumulation-compile": {ACCUMULATION: 2, "compile": "blocks"},
}
TWO: dict[str, Constraints] = {
    "dp": {DP: 2},
    "dp-accumulation": {DP: 2, ACCUMULATION: 2},
    "zero3-accumulation": {DP: 2, ZERO: 3, ACCUMULATION: 2},
    "tp-accumulation": {TP: 2, ACCUMULATION: 2},
    "pp": {PP: 2, PARTS: 2},
    "pp-uneven": {PP: 2, PARTS: 3},
    "pp-interleaved": {PP: 2, PARTS: 4, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2},
    "pp-recompute": {PP: 2, PARTS: 2, "recompute": "full"},
}
Losses = Callable[[Tensor, Tensor], Tensor]


def masked(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def at_least_one(losses: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask > 0, losses, 0).sum() / (mask > 0).sum().clamp(min=1)


def of_means(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).mean() / (mask.mean() + 1e-8)


def by_weights(losses: Tensor, mask: Tensor) -> Tensor:
    weights = mask / mask.sum()
    return (losses * weights).sum()


def picked(losses: Tensor, mask: Tensor) -> Tensor:
    return losses[mask > 0].mean() + 0.1 * torch.masked_select(losses, mask > 0).square().mean()


def between_picked(losses: Tensor, mask: Tensor) -> Tensor:
    chosen = mask.bool()
    return F.smooth_l1_loss(losses[chosen], mask[chosen], beta=0.5)


def of_both_kinds(losses: Tensor, mask: Tensor) -> Tensor:
    return masked(losses, mask) - 0.5 * masked(losses.sqrt(), 1 - mask) + losses.mean()


def of_rows(losses: Tensor, mask: Tensor) -> Tensor:
    weights = mask.sum(1)
    return torch.dot(losses.mean(1), weights) / weights.sum()


def none_in_a_part(losses: Tensor, mask: Tensor) -> Tensor:
    """The first rows of the batch, the first micro-batches, are left out."""
    mask = mask * (mask[:, :1] > 1)
    return (losses * mask).sum() / mask.sum().clamp(min=1) + losses.mean()


def in_chunks(losses: Tensor, mask: Tensor) -> Tensor:
    total, count = torch.zeros(()), 0.0
    for some, chosen in zip(losses.chunk(3, 1), mask.chunk(3, 1), strict=True):
        total = total + (some * chosen).sum()
        count += chosen.sum()
    total += 0.1 * (losses * mask).square().sum()
    total /= count
    return total


KINDS: list[Losses] = [
    masked,
    at_least_one,
    of_means,
    by_weights,
    picked,
    between_picked,
    of_both_kinds,
    of_rows,
    none_in_a_part,
    in_chunks,
]


class Language(nn.Module):
    """Words, of which each has a loss."""

    def __init__(self, mean: Losses) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, NUM_WORDS)
        self.mean = mean

    def logits(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self.logits(batch["words"]), batch["labels"]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return losses.view_as(labels)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.mean(self.losses(batch), batch["mask"])


def batches() -> list[dict[str, Tensor]]:
    """Return batches of which micro-batches count other numbers of words."""
    generator = torch.Generator().manual_seed(1)

    def batch() -> dict[str, Tensor]:
        mask = (torch.rand(8, 6, generator=generator) > 0.4).double()
        mask[5:] *= 2 * (torch.rand(3, 6, generator=generator) > 0.5)
        words, labels = torch.randint(NUM_WORDS, (2, 8, 6), generator=generator)
        return {"words": words, "labels": labels, "mask": mask}

    return [batch() for _ in range(3)]


def trained(run: Run, make: Callable[[], nn.Module]) -> None:
    model, optimizer = run.start(make())
    for batch in batches():
        output = model(run.part(batch))
        found = output if isinstance(output, dict) else {"loss": output}
        found["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        for value in found.values():
            run.keep(value.detach())
    for parameter in model.parameters():
        run.keep(parameter.detach())
    model.eval()
    for without_graph in (torch.no_grad, torch.inference_mode):
        with without_graph():
            output = model(run.part(batches()[0]))
        run.keep(output["loss"] if isinstance(output, dict) else output)


@pytest.mark.by_day(
    "masked-pp", "masked-zero3-*", "masked-tp-*", "picked-pp", "in_chunks-dp-accumulation"
)
@pytest.mark.slow
@pytest.mark.parametrize("plan", TWO)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_ratios_of_sums_train_as_on_one_device(world2: World, kind: Losses, plan: str) -> None:
    right(world2, functools.partial(trained, make=functools.partial(Language, kind)), TWO[plan])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ONE)
@pytest.mark.parametrize("kind", [masked, picked], ids=lambda kind: kind.__name__)
def test_ratios_of_sums_train_in_micro_batches(world1: World, kind: Losses, plan: str) -> None:
    right(world1, functools.partial(trained, make=functools.partial(Language, kind)), ONE[plan])


class OfCriterion(Language):
    """A module of its own computes the mean."""

    def __init__(self) -> None:
        super().__init__(masked)
        self.criterion = Criterion()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.criterion(self.losses(batch), batch["mask"])


class Criterion(nn.Module):
    def forward(self, losses: Tensor, mask: Tensor) -> Tensor:
        return masked(losses, mask)


class BesideTokenMeans(Language):
    """Token means, between and beside means that are written out."""

    def __init__(self) -> None:
        super().__init__(masked)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.logits(batch["words"]).flatten(0, 1)
        labels = batch["labels"].masked_fill(batch["labels"] < 10, -100)
        first = F.cross_entropy(logits, labels.flatten())
        norms = logits.square().mean(-1).view_as(labels)
        summed = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return first + 0.3 * masked(norms, batch["mask"]) + summed / (labels != -100).sum()


class WithMetric(Language):
    """How many words are right, of those that count, is returned beside the loss."""

    def __init__(self) -> None:
        super().__init__(masked)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, labels = self.logits(batch["words"]), batch["labels"]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        accuracy = masked(1.0 * (logits.argmax(-1) % 4 == labels % 4), batch["mask"])
        return {"loss": masked(losses.view_as(labels), batch["mask"]), "accuracy": accuracy}


class EarlyWeights(Language):
    """Weights of words are looked at before the blocks, too: by the first stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__(masked)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        weights, labels = batch["mask"] / batch["mask"].sum(), batch["labels"]
        x = self.embed(batch["words"]) * (1 + weights[..., None])
        for block in self.blocks:
            x = block(x)
        losses = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="none")
        return (losses.view_as(labels) * weights).sum()


PROGRAMS: list[Callable[[], nn.Module]] = [OfCriterion, BesideTokenMeans, WithMetric, EarlyWeights]


@pytest.mark.by_day("EarlyWeights-pp", "WithMetric-*accumulation", "BesideTokenMeans-pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", TWO)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_programs_of_ratios_train_as_on_one_device(
    world2: World, make: Callable[[], nn.Module], plan: str
) -> None:
    right(world2, functools.partial(trained, make=make), TWO[plan])


class OfLlama(nn.Module):
    """A language model of transformers, around which the loss is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.model, _ = make("llama")

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits, labels = self.model(input_ids=batch["words"]).logits, batch["labels"]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return picked(losses.view_as(labels), batch["mask"]) + masked(
            losses.view_as(labels), batch["mask"]
        )


LLAMA: dict[str, Constraints] = {
    "cp-accumulation": {CP: 2, ACCUMULATION: 2},
    "tp-pp": {TP: 2, PP: 2, PARTS: 2},
    "dp-pp": {DP: 2, PP: 2, PARTS: 2},
    "cp-pp": {CP: 2, PP: 2, PARTS: 2},
}


@pytest.mark.by_day("cp-accumulation")
@pytest.mark.slow
@pytest.mark.parametrize("plan", LLAMA)
def test_a_language_model_trains_with_masks(world2: World, world4: World, plan: str) -> None:
    world = world2 if len(LLAMA[plan]) == 2 else world4
    right(world, functools.partial(trained, make=OfLlama), LLAMA[plan])


class SureWords(Language):
    """Learns only of words that it is sure of: its own results say which count."""

    def __init__(self) -> None:
        super().__init__(masked)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.logits(batch["words"])
        chances, best = logits.detach().softmax(-1).max(-1)
        labels = best.masked_fill(chances < chances.median(-1, keepdim=True).values, -100)
        counted = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return counted + masked(logits.square().mean(-1), (-chances).exp())


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp", "dp-accumulation", "zero3-accumulation"])
def test_targets_that_a_model_computes_are_counted(world2: World, plan: str) -> None:
    right(world2, functools.partial(trained, make=SureWords), TWO[plan])


@pytest.mark.slow
def test_a_pipeline_refuses_targets_that_a_model_computes(world2: World) -> None:
    program = functools.partial(trained, make=SureWords)
    with pytest.raises(RankError, match="made from what the model computes"):
        right(world2, program, TWO["pp"])
    world2.close()


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.layer(x).tanh(), masked(x.square().mean(-1), mask)


class OfBlocks(Language):
    """Blocks compute such means, which nothing counts."""

    def __init__(self) -> None:
        super().__init__(masked)
        self.blocks = nn.ModuleList(Within() for _ in range(4))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x, total = self.embed(batch["words"]), 0.0
        for block in self.blocks:
            x, of_block = block(x, batch["mask"])
            total = total + of_block
        return self.head(x).square().mean() + total


def squared(losses: Tensor, mask: Tensor) -> Tensor:
    return masked(losses, mask).square()


def of_squared_sums(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum().square() / mask.sum()


def of_columns(losses: Tensor, mask: Tensor) -> Tensor:
    """Positions at which some row counts: no sum over rows."""
    return (losses * mask).sum() / mask.bool().any(0).sum()


def by_gradient(losses: Tensor, mask: Tensor) -> Tensor:
    weights = mask * (-losses).exp()
    return (losses * weights).sum() / weights.sum()


NOT_LINEAR: list[Losses] = [squared, of_squared_sums, of_columns, by_gradient]


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [OfBlocks, *(functools.partial(Language, each) for each in NOT_LINEAR)],
    ids=["blocks", *(each.__name__ for each in NOT_LINEAR)],
)
def test_what_is_not_linear_in_sums_is_refused_in_micro_batches(
    world1: World, make: Callable[[], nn.Module]
) -> None:
    program = functools.partial(trained, make=make)
    with pytest.raises(RankError, match="depend on each other"):
        right(world1, program, ONE["accumulation"])
    world1.close()
