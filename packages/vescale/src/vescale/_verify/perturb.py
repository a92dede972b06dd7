"""A model that computes a machine epsilon otherwise, as rounding does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def perturbing(epsilon: float, seed: int) -> Iterator[Callable[[nn.Module], None]]:
    """Give what moves a model's parameters, and what its innermost modules return, by one epsilon.

    Each element moves up or down. What is summed over rows and positions moves with the size of
    its terms then, as rounding moves it. A parameter moves all of them alike, which says nothing
    where they cancel: in the bias of a classifier, with as many rows of each class.
    """
    generator = torch.Generator().manual_seed(seed)
    handles = list[RemovableHandle]()  # models may share a module, which others train

    def factors(x: Tensor) -> Tensor:
        up = torch.randint(0, 2, x.shape, generator=generator).to(x)
        return 1 + epsilon * (2 * up - 1)

    def after(_: nn.Module, args: Any, output: Any) -> Tensor | None:
        is_number = type(output) is Tensor and output.is_floating_point()
        return output * factors(output.detach()) if is_number else None

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(factors(parameter))
        inner = (each for each in model.modules() if not any(True for _ in each.children()))
        handles.extend(each.register_forward_hook(after) for each in inner)

    try:
        yield change
    finally:
        for each in handles:
            each.remove()
