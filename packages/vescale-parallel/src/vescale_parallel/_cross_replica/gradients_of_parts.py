"""Compare gradients of all rows of a small batch with the sum of those of its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._model.random_copies import InDouble
from vescale_parallel._torch_private import backward_within_modes
from vescale_parallel._verify.modes.without_chance import WithoutChance

from .borders import part_of_rows
from .parts import NUM_PARTS, rows_in
from .results.row_lists import expanded, in_lists
from .runs import RowCheckError, Run


class GradientsDifferError(RowCheckError):
    """Rows depend on each other in a backward pass alone, which nothing here can make right."""


class NoNumbersError(GradientsDifferError):
    """Likewise, but results are nan for these rows, as where every token of one is masked."""


def compare_gradients(whole: Run, parts: Sequence[Run], num_rows: int) -> None:
    """Raise if parameters' gradients are not the sum over parts of all ``num_rows``."""
    outputs = expanded(whole.call.outputs)
    weights = [torch.randn_like(x) if has_gradient(x) and x.dim() else None for x in outputs]
    left: dict[str, Tensor] = {}
    ones = [
        torch.ones_like(x) if w is None and has_gradient(x) else w
        for x, w in zip(outputs, weights, strict=True)
    ]
    _add_gradients(whole, ones, left)
    sizes = {name: float(grad.abs().max()) for name, grad in left.items() if grad.numel()}
    for part, run in enumerate(parts):
        given: list[Tensor | None] = []
        of_lists = in_lists(run.call.outputs)
        of_part = zip(outputs, weights, expanded(run.call.outputs), of_lists, strict=True)
        for whole_output, weight, x, is_of_list in of_part:
            if not has_gradient(x):
                given.append(None)
            elif is_of_list:
                given.append(-torch.ones_like(x) if weight is None else -weight)
            elif weight is None or x.shape == whole_output.shape:
                full = torch.ones_like(x) if weight is None else weight
                given.append(-full / NUM_PARTS)
            else:
                rows = rows_in(whole_output, x, part, num_rows)
                assert rows is not None
                given.append(-part_of_rows(weight, rows, part, NUM_PARTS, num_rows))
        _add_gradients(run, given, left)
    for name, grad in left.items():
        size = sizes.get(name, 0.0)
        if not math.isfinite(size):
            grad = grad.nan_to_num(posinf=0.0, neginf=0.0)
        if grad.numel() and not float(grad.abs().max()) <= 1e-6 * (size + 1e-3):
            error = NoNumbersError if any(map(_has_nan, outputs)) else GradientsDifferError
            raise error(
                f"the gradient of {name!r} is not the sum over parts of the batch, though "
                "results are made row by row; use data_parallel.size 1 and one micro-batch"
            )


def has_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def is_flat(whole: Run, parts: Sequence[Run]) -> bool:
    """Whether a loss is one number, whatever the rows."""
    return any(
        has_gradient(expected)
        and expected.dim() == 0
        and all(torch.equal(run.call.outputs[index], expected) for run in parts)
        for index, expected in enumerate(whole.call.outputs)
    )


def _has_nan(x: Any) -> bool:
    return has_gradient(x) and bool(x.isnan().any())


def _add_gradients(run: Run, cotangents: Sequence[Tensor | None], sums: dict[str, Tensor]) -> None:
    """Add a run's gradients to sums, in their memory: those of a large model are held once."""
    outputs = expanded(run.call.outputs)
    pairs = [(x, c) for x, c in zip(outputs, cotangents, strict=True) if c is not None]
    wanted = {name: p for name, p in run.parameters.items() if p.requires_grad}
    if not pairs or not wanted:
        return
    for name, parameter in wanted.items():
        parameter.grad = sums.get(name)
    with InDouble(), WithoutChance():
        # Of all leaves: checkpoint(use_reentrant=True) refuses a backward of some.
        backward_within_modes([x for x, _ in pairs], [c for _, c in pairs])
    for name, parameter in wanted.items():
        if parameter.grad is not None:
            sums[name], parameter.grad = parameter.grad.to_dense(), None  # of sparse embeddings
