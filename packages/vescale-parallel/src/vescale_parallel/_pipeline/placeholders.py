"""Placeholders: tensors without storage for what another pipeline stage computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_dtensor import own_variable
from vescale_parallel._model.shape_questions import SHAPE_QUESTIONS


class Placeholder(Tensor):
    """Zeros without memory, of the shape of a tensor that this stage does not have.

    What is computed from a placeholder is one too. Code before a stage's first own block may
    compute with them, since all that it leaves to the block is replaced or refused. From
    then on any use is an error: it would put zeros into a result.

    Attributes:
        usable: Whether computing with placeholders is allowed now; of the whole rank, since
            one model runs at a time.
    """

    usable: bool = True

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not cls.usable and func not in SHAPE_QUESTIONS:
            raise ValueError(
                f"{getattr(func, '__name__', func)} uses a tensor that another pipeline stage "
                "computes. A stage passes one activation on, from block to block; what it is "
                "computed from before the blocks, weights of other stages included, cannot be "
                "used after or between them. Use another parallelism for this model"
            )
        return super().__torch_function__(func, types, tuple(args), dict(kwargs or {}))  # pyright: ignore[reportArgumentType]: types is a collection


own_variable(Placeholder, "usable")


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Placeholder:
    """Return a placeholder of a shape."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape).as_subclass(Placeholder)
