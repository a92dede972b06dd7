"""Warnings point at the user's line, once for each."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

from vescale_parallel._loss.token_mean import TokenMeans
from vescale_parallel._model.user_line import warn_at_user_line


def line_here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_warning_from_inside_the_package_is_at_the_callers_line() -> None:
    means = TokenMeans(2, lambda _, count: count)
    loss = torch.ones(3, requires_grad=True).sum()
    with pytest.warns(UserWarning, match="contains a sum") as caught:
        means.warn_of_sums(loss)
    assert (caught[0].filename, caught[0].lineno) == (__file__, line_here() - 1)


def test_a_line_is_warned_of_once_and_the_next_again() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            warn_at_user_line("something")
        warn_at_user_line("something")
    assert len(caught) == 2


def test_a_warning_may_be_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="something"):
            warn_at_user_line("something")
