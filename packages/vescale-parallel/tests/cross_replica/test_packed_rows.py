"""How many elements of a packed tensor every row of a call has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.dims.find_packed import packed_rows
from vescale_parallel._cross_replica.dims.media_tokens import kind_of_media, media_tokens
from vescale_parallel._cross_replica.dims.packed_rows import PackedRowsError
from vescale_parallel._cross_replica.dims.rows_by_tokens import common_rows

IMAGE, VIDEO = 50, 51


class Model(nn.Module):
    image_token: int

    def __init__(self, **named: int) -> None:
        super().__init__()
        self.config: Any = SimpleNamespace(text_config=SimpleNamespace(pad_token_id=0), **named)

    def forward(self, input_ids: Tensor, **media: Tensor) -> None:
        raise NotImplementedError


def texts(counts: list[int], token: int = IMAGE, run: int = 2) -> Tensor:
    """Return texts with so many runs of a token in each row."""
    ids = torch.arange(3, 43).repeat(len(counts), 1)
    for row, count in zip(ids, counts, strict=True):
        for number in range(count):
            row[1 + number * (run + 1) : 1 + number * (run + 1) + run] = token
    return ids


def lengths(model: nn.Module, **call: Tensor) -> dict[str, tuple[int, ...]]:
    leaves = [*call.values()]
    found = packed_rows(model, (), call)
    return {[*call][index]: rows.lengths(leaves, index) for index, rows in found}


def test_rows_have_elements_in_proportion_to_tokens() -> None:
    model, ids = Model(image_token_id=IMAGE), texts([2, 0, 1])
    found = lengths(model, input_ids=ids, pixel_values=torch.ones(12, 5))
    assert found == {"pixel_values": (8, 0, 4)}


def test_sizes_are_counted_where_there_are_some() -> None:
    """Of images with 2 and 4 tokens, of 8 patches each token."""
    ids = texts([2, 0, 0])
    ids[1, 1:5], ids[2, 1:3] = IMAGE, IMAGE
    sizes = torch.tensor([[1, 4, 4], [1, 2, 8], [1, 8, 4], [1, 4, 4]])
    pixels = torch.ones(80, 5)
    found = lengths(
        Model(image_token_id=IMAGE), input_ids=ids, pixel_values=pixels, image_grid_thw=sizes
    )
    assert found == {"pixel_values": (32, 32, 16), "image_grid_thw": (2, 1, 1)}


def test_runs_are_counted_where_images_have_other_numbers_of_tokens() -> None:
    ids = texts([2, 0, 0])
    ids[1, 1:6], ids[2, 1:2] = IMAGE, IMAGE
    found = lengths(
        Model(image_token_index=IMAGE), input_ids=ids, pixel_values=torch.ones(4, 3, 2, 2)
    )
    assert found == {"pixel_values": (2, 1, 1)}


def test_as_many_images_as_rows_need_not_be_one_each() -> None:
    model, pixels = Model(image_token_id=IMAGE), torch.ones(3, 3, 2, 2)
    assert lengths(model, input_ids=texts([2, 0, 1]), pixel_values=pixels) == {
        "pixel_values": (2, 0, 1)
    }
    assert not lengths(model, input_ids=texts([1, 1, 1]), pixel_values=pixels)


def test_arguments_go_by_the_token_of_their_kind() -> None:
    """Only the first row has images, of which any number fits that."""
    ids = texts([1, 2, 1], VIDEO)
    ids[0, 20:22] = IMAGE
    found = lengths(
        Model(image_token_id=IMAGE, video_token_id=VIDEO),
        input_ids=ids,
        pixel_values_videos=torch.ones(16, 5),
        pixel_values=torch.ones(6, 5),
    )
    assert found == {"pixel_values_videos": (4, 8, 4), "pixel_values": (6, 0, 0)}


def test_rows_have_as_many_without_a_name() -> None:
    ids = texts([2, 0, 1])
    assert lengths(Model(), input_ids=ids, frames=torch.ones(12, 5)) == {"frames": (4, 4, 4)}
    assert not lengths(Model(), input_ids=ids, frames=torch.ones(11, 5))


def test_another_proportion_than_before_is_an_error() -> None:
    model, ids = Model(image_token_id=IMAGE), texts([2, 0, 1])
    ((index, rows),) = packed_rows(
        model, (), {"input_ids": ids, "pixel_values": torch.ones(12, 5)}
    )
    assert rows.lengths([texts([1, 1, 2]), torch.ones(16, 5)], index) == (4, 4, 8)
    with pytest.raises(PackedRowsError, match=r"of the 24 elements .* \(2 for each token 50"):
        rows.lengths([texts([1, 1, 2]), torch.ones(24, 5)], index)


def test_tensors_of_a_row_each_are_not_packed() -> None:
    model, ids = Model(image_token_id=IMAGE), texts([1, 1, 1])
    labels, weights = ids.masked_fill(ids == IMAGE, -100), torch.ones(48)
    assert not lengths(model, input_ids=ids, labels=labels, weights=weights)


def test_tokens_of_texts_are_no_media() -> None:
    named = {"bos_token_id": 1, "decoder_start_token_id": 2, "max_token": 7}
    model = Model(image_token_id=IMAGE, vision_start_token_id=60, **named)
    model.image_token = VIDEO
    assert [*media_tokens(model)] == [VIDEO, IMAGE, 60]
    assert kind_of_media("audio_token_index") == "audio"


def test_ranks_go_by_what_all_of_them_see() -> None:
    """Another token fits the rows of one by chance; a third has sizes instead of pixels."""
    model = Model(image_token_id=IMAGE, vision_start_token_id=3)
    ids, other = texts([1, 2]), texts([2, 1])
    other[0, 30:33] = 3
    given = [{"input_ids": x, "pixel_values": torch.ones(12, 5)} for x in (ids, other)]
    ranks = [packed_rows(model, (), each) for each in given]
    assert [len(rank[0][1].ratios) for rank in ranks] == [2, 1]
    ((index, rows),) = common_rows(ranks)
    assert rows.lengths([*given[0].values()], index) == (4, 8)
    sizes = torch.tensor([[1, 2, 4], [2, 2, 1]])
    odd = packed_rows(model, (), {"input_ids": ids, "pixel_values": sizes})
    assert not [each for each in common_rows([ranks[0], odd]) if each[1].is_even]
