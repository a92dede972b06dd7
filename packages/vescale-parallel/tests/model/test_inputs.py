"""An example batch from a data set is what an ordinary loop calls the model with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.inputs import bind, example_from, example_of, small_examples


class Named(nn.Module):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x if y is None else x + y


class Whole(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


ROWS = [{"x": torch.ones(3), "y": torch.zeros(3)}] * 2


def test_rows_that_are_dicts_become_the_arguments_of_their_names() -> None:
    args, kwargs = bind(Named(), example_from(ROWS))
    assert args == ()
    assert {name: tuple(value.shape) for name, value in kwargs.items()} == {
        "x": (2, 3),
        "y": (2, 3),
    }


def test_a_forward_that_takes_a_batch_gets_the_dict() -> None:
    (batch,), kwargs = bind(Whole(), example_from(ROWS))
    assert kwargs == {}
    assert batch.keys() == {"x", "y"}


def test_rows_that_are_pairs_become_arguments_in_order() -> None:
    args, kwargs = bind(Named(), example_from([(torch.ones(3), torch.zeros(3))] * 2))
    assert [tuple(value.shape) for value in args] == [(2, 3), (2, 3)]
    assert kwargs == {}


class OfConfig(nn.Module):
    """A model of transformers, as far as its inputs go."""

    def __init__(self, main_input_name: str, **config: Any) -> None:
        super().__init__()
        self.main_input_name = main_input_name
        self.config = SimpleNamespace(**config)

    def get_input_embeddings(self) -> nn.Module:
        raise NotImplementedError


def test_configurations_that_do_not_say_all_of_an_input_give_no_example() -> None:
    shown = example_of(OfConfig("pixel_values", image_size=8, num_channels=3))
    assert shown is not None
    assert tuple(shown["pixel_values"].shape[1:]) == (3, 8, 8)
    assert example_of(OfConfig("pixel_values", num_channels=3)) is None  # ResNet
    assert example_of(OfConfig("pixel_values", image_size=None, num_channels=3)) is None
    assert example_of(OfConfig("pixel_values", image_size=8)) is None
    assert example_of(OfConfig("input_ids")) is None  # a vision tower, as it comes
    spoken = example_of(OfConfig("input_ids", vocab_size=5))
    assert spoken is not None
    assert int(spoken["input_ids"].max()) == 4
    encoder = OfConfig("input_features", max_source_positions=8, num_mel_bins=4)
    assert example_of(encoder) is None  # of Whisper, alone


def test_rows_to_try_are_two_and_then_whole_groups() -> None:
    batch = {"x": torch.randn(12, 3), "y": torch.arange(12)}
    assert [len(each["x"]) for each in small_examples(batch)] == [2, 3, 4, 6, 12]
    assert [len(each["y"]) for each in small_examples(batch)] == [2, 3, 4, 6, 12]


def test_no_other_rows_are_tried_of_what_has_something_without_rows() -> None:
    batch = {"x": torch.randn(12, 3), "mask": torch.randn(3, 3)}
    assert [len(each["x"]) for each in small_examples(batch)] == [12]
