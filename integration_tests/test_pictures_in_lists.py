"""Detectors are called with a list of pictures and a list of the boxes of each, one for a row."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_testing import World

from .plans import DP, ZERO, Constraints
from .programs import Run, right

pytestmark = pytest.mark.slow
Target = dict[str, Tensor]
CHANNELS = 3  # as many as a rank has pictures


class Detector(nn.Module):
    """Gives every box of a picture a loss; pictures may have any size."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.features = nn.Conv2d(CHANNELS, 8, 3, padding=1)
        self.norm, self.head = norm(8), nn.Linear(8, 4)

    def losses(self, pictures: list[Tensor], targets: list[Target]) -> list[Tensor]:
        """Return those of each picture's boxes."""
        padded = torch.stack([F.pad(x, (0, 12 - x.shape[2])) for x in pictures])
        found = self.head(self.norm(self.features(padded)).relu().mean((2, 3)))
        boxes = [target["boxes"] for target in targets]
        return [(x - each).abs().sum(1) for x, each in zip(found, boxes, strict=True)]

    def forward(self, pictures: list[Tensor], targets: list[Target]) -> Tensor:
        losses = self.losses(pictures, targets)
        return torch.stack([each.mean() for each in losses]).mean()


class Summed(Detector):
    """Divides losses by how many boxes of a picture are far off, and adds them up."""

    def forward(self, pictures: list[Tensor], targets: list[Target]) -> Tensor:
        losses = [x.sum() / max(1, (x > 1.8).sum()) for x in self.losses(pictures, targets)]
        return torch.stack(losses).sum() / len(losses)


class OverBoxes(Detector):
    """Divides by how many boxes all pictures have."""

    def forward(self, pictures: list[Tensor], targets: list[Target]) -> Tensor:
        losses = torch.cat(self.losses(pictures, targets))
        return losses.sum() / max(1, len(losses))


class Labelled(nn.Module):
    """Packs pictures of any size, beside one label of each."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.head = nn.Conv2d(CHANNELS, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, pictures: list[Tensor], labels: Tensor) -> Tensor:
        found = [self.features(x[None]).relu().mean((2, 3)) for x in pictures]
        return F.cross_entropy(self.head(torch.cat(found)), labels)


def _pictures(step: int, *, are_even: bool, num_rows: int = 6) -> list[tuple[Tensor, Target]]:
    generator = torch.Generator().manual_seed(step)
    rows: list[tuple[Tensor, Target]] = []
    for index in range(num_rows):
        size = (8, 8) if are_even else (8, 6 + 2 * (index % 3))
        boxes = torch.rand(2 if are_even else 1 + index % 4, 4, generator=generator).double()
        labels = torch.randint(0, 4, (len(boxes),), generator=generator)
        picture = torch.rand(CHANNELS, *size, generator=generator).double()
        rows.append((picture, {"boxes": boxes, "labels": labels}))
    return rows


def _own(run: Run, rows: list[tuple[Tensor, Target]]) -> list[tuple[Tensor, Target]]:
    index = run.part({"index": torch.arange(len(rows))})["index"]
    return [rows[i] for i in index.tolist()]


def _train(run: Run, model: nn.Module, batch_of: Callable[[int], tuple[Any, ...]]) -> None:
    model, optimizer = run.start(model)
    for step in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loss = model(*batch_of(step))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.keep(loss)
    run.finish(model)


def detect(run: Run, model_fn: Callable[[], nn.Module], *, are_even: bool) -> None:
    def batch_of(step: int) -> tuple[list[Tensor], list[Target]]:
        own = _own(run, _pictures(step, are_even=are_even))
        return [picture for picture, _ in own], [target for _, target in own]

    _train(run, model_fn(), batch_of)


def label(run: Run) -> None:
    def batch_of(step: int) -> tuple[list[Tensor], Tensor]:
        own = _own(run, _pictures(step, are_even=False))
        labels = torch.stack([target["labels"][0] for _, target in own])
        return [picture for picture, _ in own], labels

    _train(run, Labelled(), batch_of)


class Padded(Detector):
    """Pads pictures to the size of the widest one."""

    def losses(self, pictures: list[Tensor], targets: list[Target]) -> list[Tensor]:
        width = max(x.shape[2] for x in pictures)
        padded = torch.stack([F.pad(x, (0, width - x.shape[2])) for x in pictures])
        found = self.head(self.norm(self.features(padded)).relu().mean((2, 3)))
        boxes = [target["boxes"] for target in targets]
        return [(x - each).abs().sum(1) for x, each in zip(found, boxes, strict=True)]


def _told(model_fn: Callable[[], nn.Module], are_even: bool) -> None:
    run = Run({DP: 2})
    model, _ = run.start(model_fn())
    own = _own(run, _pictures(0, are_even=are_even))
    with pytest.warns(UserWarning, match="which ranks cannot put together: each"):
        model([picture for picture, _ in own], [target for _, target in own]).backward()


def _refused() -> None:
    with pytest.raises(ValueError, match="beside batch norms"):
        detect(Run({DP: 2}), partial(OverBoxes, nn.BatchNorm2d), are_even=True)


def _refused_parts() -> None:
    with pytest.raises(ValueError, match="does not cut into micro-batches"):
        detect(Run({DP: 2, "batch.gradient_accumulation": 2}), Detector, are_even=False)


@pytest.mark.by_day("Detector-True-plan0", "Summed-False-plan1")
@pytest.mark.parametrize("plan", [{DP: 2}, {DP: 2, ZERO: 3}])
@pytest.mark.parametrize("are_even", [True, False])
@pytest.mark.parametrize("model_fn", [Detector, Summed])
def test_pictures_in_a_list_are_the_rows(
    world2: World, model_fn: Callable[[], nn.Module], are_even: bool, plan: Constraints
) -> None:
    right(world2, partial(detect, model_fn=model_fn, are_even=are_even), plan)


def test_batch_norm_of_pictures_in_a_list_is_over_those_of_all_ranks(world2: World) -> None:
    program = partial(detect, model_fn=partial(Detector, nn.BatchNorm2d), are_even=True)
    right(world2, program, {DP: 2})


def test_pictures_in_a_list_beside_a_label_of_each_are_the_rows(world2: World) -> None:
    right(world2, label, {DP: 2})


@pytest.mark.parametrize("are_even", [True, False])
@pytest.mark.parametrize("model_fn", [OverBoxes, Padded])
def test_what_depends_on_pictures_of_other_ranks_is_told(
    world2: World, model_fn: Callable[[], nn.Module], are_even: bool
) -> None:
    world2.run(_told, model_fn, are_even)


def test_batch_norms_beside_losses_over_lists_of_all_pictures_are_refused(world2: World) -> None:
    world2.run(_refused)


def test_lists_of_pictures_are_not_cut_into_micro_batches(world2: World) -> None:
    world2.run(_refused_parts)
