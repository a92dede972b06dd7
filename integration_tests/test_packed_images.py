"""Micro-batches and ranks have the images of their own rows, however many these have."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vescale
from vescale_parallel import parallelize
from vescale_testing import World

from .families import InDouble
from .packed_images import FAMILIES, IMAGE, VOCABULARY, Counts, llava, part_of, pictures
from .plans import DP, PARTS, PP, ZERO, Constraints, make_plan
from .training import whole

ACCUMULATION = "batch.gradient_accumulation"
IN_PARTS: dict[str, Constraints] = {
    "accumulated": {ACCUMULATION: 2},
    "pipeline": {PP: 2, PARTS: 2},
    "four parts": {PP: 2, PARTS: 4},
}

# Of the rows of three steps: one image each, then more in some of them and none in others, too.
LATER = ((1, 1, 1, 1), (2, 1, 1, 1), (2, 0, 1, 1), (0, 0, 2, 1))
AT_FIRST = ((2, 0, 1, 1), (1, 1, 1, 1), (3, 0, 0, 1))
ALIKE = ((2, 2, 2, 2), (1, 3, 2, 0))
NUMBERS = {"later": LATER, "at first": AT_FIRST, "alike": ALIKE}

# The others have tests of their own.
TRAINED = [
    (family, numbers)
    for family in FAMILIES
    for numbers in NUMBERS
    if family != "smolvlm" and (family, numbers) != ("qwen2_audio", "at first")
]

Found = tuple[list[float], dict[str, Tensor]]


def trained(model: Any, batches: Iterable[dict[str, Any]]) -> Found:
    """Return the losses of steps, and the gradients of the last one."""
    losses: list[float] = []
    for batch in batches:
        model.zero_grad()
        with InDouble():
            loss = model(**batch).loss
            loss.backward()
        losses.append(float(whole(loss)))
    grads = ((fqn, p.grad) for fqn, p in model.named_parameters() if p.grad is not None)
    return losses, {fqn: whole(grad) for fqn, grad in grads}


def steps(family: str, numbers: Sequence[Counts], constraints: Constraints | None = None) -> Found:
    """Return what a model is trained to; with a plan, on this rank's rows."""
    build, batch_of = FAMILIES[family]
    model: Any = build()
    if constraints is not None:
        model = parallelize(make_plan(constraints), model)
    num_parts = (constraints or {}).get(DP, 1)
    batches: list[dict[str, Any]] = []
    for step, counts in enumerate(numbers):
        batch: dict[str, Any] = {**batch_of(step, counts)}
        if num_parts > 1:
            batch = {**part_of(batch, counts, vescale.data_parallel_rank(model), num_parts)}
        batches.append(batch)
    return trained(model, batches)


def same(found: Found, expected: Found) -> None:
    # Sums over micro-batches are in another order: a few roundings of float64.
    torch.testing.assert_close(found[0], expected[0], rtol=1e-14, atol=0)
    assert {fqn for fqn, grad in found[1].items() if grad.any()} == {
        fqn for fqn, grad in expected[1].items() if grad.any()
    }
    for fqn, gradient in expected[1].items():
        if gradient.any():
            # Likewise; of elements that cancel to nearly nothing the last digits are left.
            torch.testing.assert_close(found[1][fqn], gradient, msg=fqn, rtol=1e-9, atol=1e-15)


@pytest.mark.slow
@pytest.mark.by_day(
    "qwen2_5_vl-later-pipeline",
    "qwen3_vl-at first-four parts",
    "mistral3-later-pipeline",
    "llava-alike-accumulated",
)
@pytest.mark.parametrize("parts", IN_PARTS)
@pytest.mark.parametrize(("family", "numbers"), TRAINED)
def test_micro_batches_have_the_images_of_their_rows(
    world1: World, world2: World, family: str, numbers: str, parts: str
) -> None:
    world = world1 if parts == "accumulated" else world2
    expected = steps(family, NUMBERS[numbers])
    for found in world.run(steps, family, NUMBERS[numbers], IN_PARTS[parts]):
        same(found, expected)


@pytest.mark.slow
@pytest.mark.by_day("pipeline")
@pytest.mark.parametrize("parts", IN_PARTS)
def test_rows_with_padded_images_do_not_depend_on_each_other(
    world1: World, world2: World, parts: str
) -> None:
    """Every row has one: a batch of padding alone is refused by the model itself."""
    world = world1 if parts == "accumulated" else world2
    numbers = ((2, 1, 1, 1), (1, 1, 1, 1), (2, 2, 1, 3))
    for found in world.run(steps, "smolvlm", numbers, IN_PARTS[parts]):
        same(found, steps("smolvlm", numbers))


def test_as_many_sounds_as_rows_are_taken_for_one_each_at_first(world1: World) -> None:
    """Of a spectrum and its mask a first call says no more, and the model refuses a later one."""
    with pytest.raises(Exception, match="Audio features and audio tokens do not match"):
        world1.run(steps, "qwen2_audio", AT_FIRST, {ACCUMULATION: 2})


# The second of two ranks has none, in its first batch or a later one.
WITHOUT = {"at first": ((2, 1, 0, 0), (1, 1, 1, 1)), "later": ((2, 1, 1, 1), (1, 2, 0, 0))}
RANKS: dict[str, Constraints] = {
    "data": {DP: 2},
    "zero1": {DP: 2, ZERO: 1},
    "accumulated": {DP: 2, ACCUMULATION: 2},
    "pipelines": {DP: 2, PP: 2, PARTS: 2},
}


@pytest.mark.slow
@pytest.mark.by_day(
    "qwen2_5_vl-later-data", "qwen2_5_vl-at first-zero1", "qwen3_vl-at first-pipelines"
)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("when", WITHOUT)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_rank_may_have_a_batch_without_images(
    world2: World, world4: World, family: str, when: str, ranks: str
) -> None:
    """A form of call that is new to it alone; its tower has no gradient."""
    world = world4 if ranks == "pipelines" else world2
    expected = steps(family, WITHOUT[when])
    for found in world.run(steps, family, WITHOUT[when], RANKS[ranks]):
        same(found, expected)


@pytest.mark.slow
def test_ranks_that_run_other_blocks_are_told_which_stage_takes_that(world2: World) -> None:
    with pytest.raises(
        Exception, match=r"ran different blocks .* Use data_parallel\.zero_stage 1"
    ):
        world2.run(steps, "qwen2_5_vl", WITHOUT["later"], {DP: 2, ZERO: 3})


def planned(numbers: Sequence[Counts]) -> Found:
    """Return the same under a plan that was made of a batch with images."""
    build, batch_of = FAMILIES["qwen2_5_vl"]
    plan = vescale.generate_plan(
        build(), {PP: 2, PARTS: 2}, world_size=2, example_batch=batch_of(0, numbers[0])
    )
    model = vescale.parallelize(plan, build())
    return trained(model, (batch_of(step, counts) for step, counts in enumerate(numbers)))


@pytest.mark.slow
def test_plans_are_made_of_batches_that_pack_images(world2: World) -> None:
    for found in world2.run(planned, AT_FIRST):
        same(found, steps("qwen2_5_vl", AT_FIRST))


class Captions(nn.Module):
    """A model of its own, of which forward returns the loss."""

    def __init__(self, *, named: bool = False, penalty: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        if named:
            self.image_token = IMAGE
        self.penalty = penalty
        self.tower = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2))
        self.embed, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor,
        pixel_values: Tensor | None = None,
    ) -> Tensor:
        x, loss = self.embed(input_ids), torch.zeros(())
        if pixel_values is not None:
            features = self.tower(pixel_values).transpose(1, 2)
            at = input_ids == IMAGE
            if int(at.sum()) != len(features.flatten(0, 1)):
                raise ValueError("tokens and images do not match")
            x = x.masked_scatter(at[..., None], features)
            loss = self.penalty * features.square().mean()
        for block in self.blocks:
            x = block(x)
        return loss + F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def captions(
    numbers: Sequence[Counts], constraints: Constraints | None, options: dict[str, Any]
) -> list[float]:
    """Return the losses of the model."""
    model: Any = Captions(**options).double()
    if constraints is not None:
        model = parallelize(make_plan(constraints), model)
    num_parts = (constraints or {}).get(DP, 1)
    losses: list[float] = []
    for step, counts in enumerate(numbers):
        batch = pictures(step, counts)
        if num_parts > 1:
            rows = [torch.tensor([*counts]), torch.arange(4)]
            part = vescale.data_parallel_rank(model)
            own = rows[0].chunk(2)[part]
            start = int(rows[0].chunk(2)[0].sum()) * part
            pixels = batch.pop("pixel_values")[start : start + int(own.sum())]
            batch = {name: x.chunk(2)[part] for name, x in batch.items()}
            batch["pixel_values"] = pixels
        with InDouble(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "it could not be checked")
            loss = model(**batch)
            loss.backward()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_token_may_be_named_by_the_model_itself(world1: World, numbers: str) -> None:
    rows, options = [each for each in NUMBERS[numbers] if any(each)], {"named": True}
    expected = captions(rows, None, options)
    for found in world1.run(captions, rows, {ACCUMULATION: 2}, options):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)  # as in same()


@pytest.mark.parametrize("numbers", [((2, 1, 1, 1),), ((2, 2, 2, 2), (3, 2, 2, 1))])
def test_errors_of_a_model_say_how_to_name_a_token(
    world1: World, numbers: Sequence[Counts]
) -> None:
    with pytest.raises(Exception, match=r"name the token .*model\.config\.image_token_id"):
        world1.run(captions, numbers, {ACCUMULATION: 2}, {})


def test_rows_that_have_other_numbers_than_in_a_call_before(world1: World) -> None:
    with pytest.raises(
        Exception, match=r"as many elements of every row, got shape \(5, 3, 8, 8\)"
    ):
        world1.run(captions, ((1, 1, 1, 1), (2, 1, 1, 1)), {ACCUMULATION: 2}, {})


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [((1, 1, 1, 1),), ((2, 1, 1, 1),)])
@pytest.mark.parametrize("constraints", [{ACCUMULATION: 2}, {DP: 2}])
def test_means_over_images_are_no_means_over_rows(
    world1: World, world2: World, constraints: Constraints, numbers: Sequence[Counts]
) -> None:
    """Also where every row has one in the first call: in the next one they need not."""
    world = world2 if DP in constraints else world1
    options = {"named": True, "penalty": 0.1}
    with pytest.raises(Exception, match="rows of the batch depend on each other"):
        world.run(captions, numbers, constraints, options)


def dropped(numbers: Sequence[Counts], constraints: Constraints) -> list[str]:
    """Return what a tower with dropout warns of."""
    model: Any = parallelize(make_plan(constraints), llava(dropout=0.5))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, counts in enumerate(numbers):
            with InDouble():
                model(**pictures(step, counts)).loss.backward()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("numbers", [((2, 0, 1, 2),), ((1, 1, 1, 1), (2, 2, 1, 0))])
def test_rows_of_other_lengths_draw_otherwise_and_say_so(
    world1: World, numbers: Sequence[Counts]
) -> None:
    for said in world1.run(dropped, numbers, {ACCUMULATION: 2}):
        assert any("cannot draw its part" in each for each in said)
