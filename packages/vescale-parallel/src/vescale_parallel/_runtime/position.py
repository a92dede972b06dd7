"""Where this rank is among those that share a global batch."""

from __future__ import annotations

from torch import nn

from .engine import Engine
from .module import ParallelModule


def data_parallel_rank(model: nn.Module) -> int:
    """Return which part of the global batch this rank gets: 0 to ``data_parallel.size`` - 1.

    It is what a sampler of your own has to go by: tensor-, pipeline- and context-parallel
    ranks of one part get the same rows, so the rank of the process would be wrong.

    Args:
        model: A parallelized model.

    Raises:
        TypeError: If the model is not parallelized.

    Example:
        >>> from vescale_parallel import ParallelPlan, parallelize
        >>> data_parallel_rank(parallelize(ParallelPlan(), nn.Linear(4, 2)))
        0
    """
    return _engine_of(model).data_ranks.part


def mesh_coordinate(model: nn.Module) -> dict[str, int]:
    """Return this rank's place on every axis of a parallelized model's mesh, by name.

    Raises:
        TypeError: If the model is not parallelized.
    """
    mesh = _engine_of(model).mesh
    names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
    assert names is not None
    assert coordinate is not None
    return dict(zip(names, coordinate, strict=True))


def _engine_of(model: nn.Module) -> Engine:
    if not isinstance(model, ParallelModule):
        raise TypeError(
            f"expected the model that parallelize returned, got {type(model).__name__}"
        )
    return model._vescale_engine
