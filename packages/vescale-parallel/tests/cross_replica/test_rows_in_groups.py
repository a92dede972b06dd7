"""Models that do not run on any number of rows: of several images each, or in groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vescale_parallel._cross_replica.borders import RowCoupling
from vescale_parallel._cross_replica.call_guard import RowGuard

IMAGE, BEGIN, LENGTH, NUM_FEATURES = 0, 1, 10, 6
# A check takes four, or whole groups of up to 64.
NUM_ROWS = [1, 2, 3, 4, 6, 8, 12, 16]


class Captions(nn.Module):
    """A language model of texts with images in them, all images of all rows in one tensor."""

    image_token_id: int

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.tower = nn.Embedding(16, 8), nn.Linear(NUM_FEATURES, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        at = ids == IMAGE
        if int(at.sum()) != len(images):
            raise ValueError("tokens and images do not match")
        x_BSD = self.tokens(ids).masked_scatter(at[..., None], self.tower(images))
        return F.cross_entropy(self.head(x_BSD).flatten(0, 1), ids.flatten())


class Texts(nn.Module):
    """A language model of texts that begin with one token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(16, 8), nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if not bool((ids[:, 0] == BEGIN).all()):
            raise ValueError("a text does not begin")
        q, k, v = self.mix(self.tokens(ids)).unsqueeze(1).chunk(3, -1)
        logits = self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        losses = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return (losses * mask).mean()


class Answers(nn.Module):
    """A model of such texts, whose loss compares rows of a group."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.tokens, self.head, self.group = nn.Embedding(16, 8), nn.Linear(8, 16), group

    def forward(self, ids: Tensor, rewards: Tensor) -> Tensor:
        if not bool((ids[:, 0] == BEGIN).all()):
            raise ValueError("a text does not begin")
        of_groups = rewards.view(-1, self.group)
        advantages = (of_groups - of_groups.mean(1, keepdim=True)).view(-1, 1)
        logs = self.head(self.tokens(ids)).log_softmax(-1).gather(2, ids[..., None]).squeeze(2)
        return -(logs * advantages).mean()


def texts(num_rows: int) -> Tensor:
    ids = torch.randint(2, 16, (num_rows, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = BEGIN
    return ids


def coupling(model: nn.Module, *given: Tensor) -> tuple[RowCoupling, bool]:
    return RowGuard(model, lambda mine: [mine]).coupling(model, given, {})


def with_images(num_rows: int, more: int) -> tuple[Tensor, Tensor]:
    """Return texts with two images each, and more in the first one."""
    ids = texts(num_rows)
    ids[:, 2:4], ids[0, 4 : 4 + more] = IMAGE, IMAGE
    return ids, torch.randn(2 * num_rows + more, NUM_FEATURES)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_tokens_with_a_name_tell_whose_images_are(num_rows: int, more: int) -> None:
    model, given = Captions(), with_images(num_rows, more)
    model.image_token_id = IMAGE
    found, is_checked = coupling(model, *given)
    assert (found.regions, is_checked) == ({}, True)
    rows = found.rows_of(given, {})
    assert rows is not None
    assert rows[1] is not None
    assert rows[1].lengths == (2 + more, *[2] * (num_rows - 1))


@pytest.mark.parametrize("num_rows", [n for n in NUM_ROWS if n != NUM_FEATURES])
def test_rows_have_as_many_images_each_without_a_name(num_rows: int) -> None:
    found, is_checked = coupling(Captions(), *with_images(num_rows, 0))
    assert (found.regions, is_checked) == ({}, True)


@pytest.mark.parametrize("num_rows", NUM_ROWS[1:])
def test_rows_of_several_images_do_not_depend_on_each_other(num_rows: int) -> None:
    """With more in one of them, and a token that has no name: it is not known which are whose."""
    model, given = Captions(), with_images(num_rows, 1)
    with torch.no_grad():
        assert not coupling(model, *given)[0].regions
    with pytest.warns(UserWarning, match="could not be checked .* tokens and images"):
        found, is_checked = coupling(model, *given)
    assert (found.regions, is_checked) == ({}, False)


@pytest.mark.parametrize("length", [4, LENGTH])
@pytest.mark.parametrize("num_rows", [2, 3])
def test_positions_of_a_text_are_not_taken_for_rows(num_rows: int, length: int) -> None:
    """Few rows are made more, which do not begin as texts do; the first few positions do."""
    given = texts(num_rows)[:, :length], torch.ones(num_rows, length)
    with pytest.warns(UserWarning, match="could not be checked .* does not begin"):
        found, is_checked = coupling(Texts(), *given)
    assert (found.regions, is_checked) == ({}, False)


@pytest.mark.parametrize("group", [4, 6, 8, 16])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_rows_of_a_group_depend_on_each_other(group: int, num_groups: int) -> None:
    num_rows = group * num_groups
    found, is_checked = coupling(Answers(group), texts(num_rows), torch.randn(num_rows))
    assert ([*found.regions], is_checked) == ([""], True)


@pytest.mark.parametrize("num_rows", [4, 6])
def test_class_weights_are_no_rows_where_there_are_as_many(num_rows: int) -> None:
    """Neither the code runs on fewer of them nor on more."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, num_rows)

        def forward(self, x: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
            losses = F.cross_entropy(self.head(x), targets, weight, reduction="none")
            return losses.mean()

    targets = torch.arange(num_rows) % 3
    found, is_checked = coupling(
        Weighted(), torch.randn(num_rows, 5), targets, torch.rand(num_rows)
    )
    assert (found.regions, is_checked) == ({}, True)
    assert found.given is not None
    assert found.given[2] is None
