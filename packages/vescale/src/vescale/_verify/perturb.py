"""A model that computes a machine epsilon otherwise, as rounding does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def perturb(model: nn.Module, epsilon: float, seed: int) -> None:
    """Move every parameter, and what innermost modules return, by one epsilon, up or down.

    What is summed over rows and positions moves with the size of its terms then, as rounding moves
    it. A parameter moves all of them alike, which says nothing where they cancel: in the bias of a
    classifier, with as many rows of each class.
    """
    generator = torch.Generator().manual_seed(seed)

    def factors(x: Tensor) -> Tensor:
        up = torch.randint(0, 2, x.shape, generator=generator).to(x)
        return 1 + epsilon * (2 * up - 1)

    def after(_: nn.Module, args: Any, output: Any) -> Tensor | None:
        is_number = type(output) is Tensor and output.is_floating_point()
        return output * factors(output.detach()) if is_number else None

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(factors(parameter))
    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(after)
