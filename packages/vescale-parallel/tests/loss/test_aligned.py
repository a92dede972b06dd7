"""What micro-batches returned, leaf by leaf, where some returned less than others."""

from __future__ import annotations

import pytest

from vescale_parallel._loss.aligned import Aligned


def test_leaves_are_found_by_name() -> None:
    """Of a micro-batch without images, which comes first."""
    outputs = [{"loss": 1, "logits": 2}, {"features": 3, "loss": 4, "logits": 5}]
    aligned = Aligned.of(outputs)
    assert aligned.fullest is outputs[1]
    assert aligned.names == ["['features']", "['loss']", "['logits']"]
    assert aligned.columns == [{1: 3}, {0: 1, 1: 4}, {0: 2, 1: 5}]
    assert aligned.of_all(1, 2) == [1, 4]


def test_the_last_of_equal_outputs_is_the_fullest() -> None:
    outputs = [(1, 2), (3, 4)]
    assert Aligned.of(outputs).fullest is outputs[1]


def test_numbers_that_some_lack_are_no_means() -> None:
    aligned = Aligned.of([{"loss": 1}, {"loss": 2, "penalty": 3}])
    with pytest.raises(ValueError, match=r"output\['penalty'\], for some micro-batches"):
        aligned.of_all(1, 2)


def test_outputs_of_which_each_has_its_own_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"different structures, of which one has .*'texts'"):
        Aligned.of([{"loss": 1, "texts": 2}, {"loss": 1, "images": 2}])
