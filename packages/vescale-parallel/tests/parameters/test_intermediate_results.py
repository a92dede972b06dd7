"""Which results of a call are computed from which."""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_parallel._parameters.intermediate_results import in_graph_order


def named(results: dict[str, Tensor]) -> dict[str, set[str]]:
    """Return the names of the results that each one is computed from, in order."""
    names = {id(result): name for name, result in results.items()}
    return {
        names[id(result)]: {names[id(each)] for each in sources}
        for result, sources in in_graph_order(list(results.values()))
    }


def test_a_result_has_all_that_it_is_computed_from_however_far_back() -> None:
    x = torch.ones(4, requires_grad=True)
    first = x * 2
    second = first.exp().sin()
    other = x.cos()
    last = (second + other).sum()
    found = named({"last": last, "other": other, "second": second, "first": first})
    assert found == {
        "first": set(),
        "second": {"first"},
        "other": set(),
        "last": {"first", "second", "other"},
    }
    assert list(found) == ["first", "second", "other", "last"]


def test_parts_of_one_split_are_told_apart() -> None:
    one, other = (torch.ones(4, requires_grad=True) * 2).chunk(2)
    assert named({"one": one, "other": other, "of_one": one.exp()}) == {
        "one": set(),
        "other": set(),
        "of_one": {"one"},
    }
