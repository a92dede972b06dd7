"""Where this rank is among those that share a global batch."""

from __future__ import annotations

from torch import nn

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
    if not isinstance(model, ParallelModule):
        raise TypeError(
            f"expected the model that parallelize returned, got {type(model).__name__}"
        )
    return model._vescale_engine.data_ranks.part
