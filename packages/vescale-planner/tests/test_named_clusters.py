"""Clusters by name, several plans at once, and what is predicted of a second."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_planner import Cluster, generate_plan, generate_plans


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


def test_a_cluster_may_be_given_by_its_name() -> None:
    named = generate_plan(Net(), world_size=4, cluster="H100")
    assert named == generate_plan(Net(), world_size=4, cluster=Cluster.preset("h100"))


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"cluster of \['a100', .*'h200', 'mi300x'\], got 'h1000'; for ot"
    ):
        generate_plan(Net(), world_size=4, cluster="h1000")
    with pytest.raises(TypeError, match=r"a name of \['a100', .* got 8"):
        generate_plan(Net(), world_size=4, cluster=8)  # pyright: ignore[reportArgumentType]: refused


def test_samples_tokens_and_mfu_are_those_of_the_batch() -> None:
    batch = torch.zeros(2, 8, 16)  # rows, tokens, features
    plan = generate_plan(Net(), world_size=4, cluster="h100", example_batch=batch)
    estimate = plan.estimate
    assert estimate is not None
    assert not estimate.is_assumed
    assert (estimate.samples, estimate.tokens) == (2 * 4, 2 * 4 * 8)
    # Forward multiplies and adds once a token and matrix element, backward twice.
    assert estimate.flops == 3 * 2 * (4 * 16 * 16) * 2 * 4 * 8
    peak = Cluster.preset("h100").flops_per_second[4]
    assert estimate.mfu(4) == estimate.flops / (estimate.step_seconds * 4 * peak)
    assert "samples/s" in str(plan)
    assert "tokens/s" in str(plan)


def test_what_no_batch_tells_is_said_to_be_assumed() -> None:
    plan = generate_plan(Net(), {"batch.global_size": 8}, world_size=4, cluster="h100")
    assert plan.estimate is not None
    assert plan.estimate.is_assumed
    assert plan.estimate.samples == 8
    assert "(of an assumed batch" in " ".join(str(plan).split())


def test_several_plans_are_the_best_of_different_layouts() -> None:
    batch = torch.zeros(8, 16)
    plans = generate_plans(Net(), top=3, world_size=4, cluster="cpu", example_batch=batch)
    best = generate_plan(Net(), world_size=4, cluster="cpu", example_batch=batch)
    assert plans[0] == best
    sizes = [(p.tensor_parallel.size, p.pipeline_parallel.size) for p in plans]
    assert len(set(sizes)) == len(plans) > 1
    with pytest.raises(ValueError, match="top to be a positive integer, got 0"):
        generate_plans(Net(), top=0, world_size=4, cluster="cpu")
