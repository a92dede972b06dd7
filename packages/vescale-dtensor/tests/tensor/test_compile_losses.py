"""Compiled losses of scores whose batch or classes are cut, and what of them stays on disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale_dtensor import DTensor, distribute_tensor
from vescale_testing import World

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"reduction": "none"}, {"label_smoothing": 0.1})


def _mesh() -> DeviceMesh:
    torch._dynamo.reset()
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _scores_and_targets() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    targets = torch.arange(6) * 3 % 10
    targets[2] = -100
    return torch.randn(6, 10, dtype=torch.float64), targets


def _check_losses(dim: int, backend: str, options: tuple[dict[str, Any], ...] = OPTIONS) -> None:
    mesh = _mesh()
    for given in options:
        plain, targets = _scores_and_targets()
        scores = distribute_tensor(plain, mesh, (Shard(dim),)).requires_grad_()
        plain.requires_grad_()
        expected = F.cross_entropy(plain, targets, **given)
        compiled = torch.compile(F.cross_entropy, backend=backend, fullgraph=True)
        loss: Any = compiled(scores, distribute_tensor(targets, mesh, (Replicate(),)), **given)
        expected.sum().backward()
        loss.sum().backward()
        # float64; the sums over classes of two ranks are in another order.
        torch.testing.assert_close(loss.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        assert isinstance(scores.grad, DTensor)
        torch.testing.assert_close(scores.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_mean_over_targets_is_one_graph(world2: World, dim: int) -> None:
    world2.run(_check_losses, dim, "aot_eager")


def _check_wrong_targets() -> None:
    mesh = _mesh()
    plain, targets = _scores_and_targets()
    scores = distribute_tensor(plain, mesh, (Shard(1),))
    compiled = torch.compile(F.cross_entropy, backend="aot_eager")
    with pytest.raises(RuntimeError, match="a target is not among 10 classes"):
        compiled(scores, distribute_tensor(targets + 9, mesh, (Replicate(),)))


@pytest.mark.slow
def test_a_compiled_loss_refuses_targets_out_of_range(world2: World) -> None:
    world2.run(_check_wrong_targets)


def _hash_of(dim: int) -> str:
    scores = distribute_tensor(torch.ones(4, 6), _mesh(), (Shard(dim),))
    return scores._stable_hash_for_caching()


@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_do_not_find_each_others_programs_on_disk(world2: World, dim: int) -> None:
    first, second = world2.run(_hash_of, dim)
    assert first != second


def _check_found_again(folder: Path) -> None:
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)  # inductor's own imports
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        found: Any = torch._dynamo.utils.counters["aot_autograd"]
        for hits in (0, 1):
            before = found["autograd_cache_hit"]
            _check_losses(1, "inductor", ({},))
            assert found["autograd_cache_hit"] - before == hits


@pytest.mark.nightly
def test_a_program_that_is_found_on_disk_is_this_ranks(world2: World, tmp_path: Path) -> None:
    world2.run(_check_found_again, tmp_path, timeout=300)
