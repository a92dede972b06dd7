from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_parallel._trace.axes import Axes, infer_axes
from vescale_parallel._trace.axes.algebra import Segment
from vescale_parallel._trace.fake_tensors import ObservationError


def test_unified_dims_are_one_atom() -> None:
    axes = Axes()
    one, other = axes.fresh(12), axes.fresh(12)
    assert axes.unify(one, other)
    assert axes.atoms(one) == axes.atoms(other)


def test_a_view_splits_an_axis_and_a_view_back_restores_it() -> None:
    axes = Axes()
    dim = axes.fresh(24)
    split = axes.regroup([dim], [4, 6])
    assert split is not None
    assert axes.regroup(split, [24]) == [axes.factors(dim)]
    assert [axes.length(part) for part in split] == [4, 6]


def test_unifying_with_a_split_dim_splits_the_other_too() -> None:
    axes = Axes()
    dim, other = axes.fresh(24), axes.fresh(24)
    split = axes.regroup([dim], [4, 6])
    assert split is not None
    assert axes.unify(dim, other)
    assert axes.factors(other) == axes.factors((*split[0], *split[1]))


def test_grouped_heads_split_the_query_heads() -> None:
    axes = Axes()
    queries, keys, group = axes.fresh(8), axes.fresh(2), axes.fresh(4)
    assert axes.unify(queries, (*keys, *group))
    assert axes.factors(queries) == axes.factors((*keys, *group))


def test_dims_that_divide_differently_are_not_unified() -> None:
    axes = Axes()
    assert not axes.unify((axes.new(4), axes.new(6)), (axes.new(3), axes.new(8)))


def test_a_view_that_tears_an_axis_is_refused() -> None:
    axes = Axes()
    assert axes.regroup([(axes.new(4),), (axes.new(6),)], [3, 8]) is None


def test_slices_are_segments_with_axes_of_their_own() -> None:
    axes = Axes()
    dim = axes.fresh(10)
    lower, upper = axes.slice(dim, 0, 4), axes.slice(dim, 4, 6)
    assert lower is not None
    assert upper is not None
    assert not axes.atoms(lower) & axes.atoms(upper)
    assert axes.atoms(dim) == axes.atoms(lower) | axes.atoms(upper)


def test_the_same_slice_is_the_same_segment() -> None:
    axes = Axes()
    dim = axes.fresh(10)
    assert axes.slice(dim, 4, 6) == axes.slice(dim, 4, 6)


def test_a_slice_of_a_concatenation_gives_back_what_was_concatenated() -> None:
    axes = Axes()
    one, other = axes.fresh(4), axes.fresh(6)
    joined = axes.cat([Segment(4, one), Segment(6, other)])
    assert axes.slice(joined, 4, 6) == other


def test_a_finer_slice_divides_a_segment() -> None:
    axes = Axes()
    dim = axes.fresh(10)
    upper = axes.slice(dim, 4, 6)
    part = axes.slice(dim, 6, 4)
    assert upper is not None
    assert part is not None
    assert axes.atoms(part) < axes.atoms(upper)


def test_sums_with_other_boundaries_are_refined_to_common_ones() -> None:
    axes = Axes()
    one, other = axes.fresh(10), axes.fresh(10)
    axes.slice(one, 0, 4)
    axes.slice(other, 0, 6)
    assert axes.unify(one, other)
    segments = axes.segments(axes.factors(one)[0])
    assert segments is not None
    assert [segment.length for segment in segments] == [4, 2, 4]


def test_a_view_of_equal_segments_makes_them_one() -> None:
    axes = Axes()
    one, other = axes.fresh(4), axes.fresh(4)
    joined = axes.cat([Segment(4, one), Segment(4, other)])
    split = axes.regroup([joined], [2, 4])
    assert split is not None
    assert axes.atoms(one) == axes.atoms(other) == axes.atoms(split[1])


def test_rotary_halves_share_an_axis() -> None:
    axes = Axes()
    dim = axes.fresh(8)
    lower, upper = axes.slice(dim, 0, 4), axes.slice(dim, 4, 4)
    assert lower is not None
    assert upper is not None
    rotated = axes.cat([Segment(4, upper), Segment(4, lower)])
    assert axes.unify(dim, rotated)
    assert axes.atoms(lower) == axes.atoms(upper)


def test_a_dim_that_meets_itself_shifted_is_refused() -> None:
    axes = Axes()
    dim = axes.fresh(5000)
    earlier, later = axes.slice(dim, 0, 4999), axes.slice(dim, 1, 4999)
    assert earlier is not None
    assert later is not None
    assert not axes.unify(earlier, later)


class Mixes(nn.Module):
    """Meets its weight with an operator that has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12, bias=False)
        self.second = nn.Linear(12, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(torch.linalg.matrix_exp(y[:, :12].expand(12, 12)))


def test_an_operator_without_a_rule_is_reported_with_its_module() -> None:
    model = nn.Sequential(Mixes())
    unknown = infer_axes(model, torch.randn(1, 8)).unknown
    assert [(each.operator, each.module) for each in unknown] == [("linalg_matrix_exp", "0")]


def test_the_model_and_the_random_state_are_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 4))
    before = {name: p.clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    infer_axes(model, torch.randn(2, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_on_the_meta_device_gives_the_same_steps() -> None:
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    real = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    batch = torch.zeros(2, 4)
    steps = [[s.operator for s in infer_axes(m, batch).steps] for m in (meta, real)]
    assert steps[0] == steps[1]


class AsksForValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_a_forward_that_needs_values_is_refused_with_operator_and_module() -> None:
    with pytest.raises(
        ObservationError, match=r"in module '0' \(AsksForValues\) at operator aten\."
    ):
        infer_axes(nn.Sequential(AsksForValues()), torch.full((2, 2), 0.5))


class Solved(nn.Module):
    """Triangular systems of heads, whose right-hand sides are features of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.systems, self.sides = nn.Linear(8, 3 * 5), nn.Linear(8, 3 * 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        systems = self.systems(x).unflatten(-1, (3, 5)).transpose(1, 2)  # (rows, heads, 5, 5)
        sides = self.sides(x).unflatten(-1, (3, 7)).transpose(1, 2)  # (rows, heads, 5, 7)
        solved = torch.linalg.solve_triangular(systems, sides, upper=False, unitriangular=True)
        return solved.transpose(1, 2).flatten(2)


def test_systems_are_solved_each_by_itself_and_needed_whole() -> None:
    trace = infer_axes(Solved(), torch.randn(2, 5, 8))
    axes = trace.axes
    (returned,) = trace.returned
    heads, features = axes.factors(returned.dims[2])
    rows = axes.factors(trace.parameters["sides.weight"].dims[0])
    assert rows == (heads, features)
    system_heads, unknowns = axes.factors(trace.parameters["systems.weight"].dims[0])
    assert system_heads == heads
    blocked = {atom for each in trace.obstacles for atom in axes.atoms(each.dim)}
    assert axes.atoms((unknowns,)) <= blocked
    assert not axes.atoms((heads, features)) & blocked
