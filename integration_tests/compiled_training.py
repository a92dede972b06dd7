"""A few steps of a model whose blocks may be compiled, and what was compiled."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import GatherWarning
from vescale_parallel import CompiledBlock, compile_report

from .training import whole


def train_steps(
    model: Any, batches: Iterable[dict[str, Tensor]], *, is_compiled: bool
) -> tuple[dict[str, Tensor], dict[str, CompiledBlock]]:
    """Return losses, the gradients of the first step and parameters; and what was compiled."""
    found = dict[str, Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", GatherWarning)  # of what counts tokens
            # Under tensor parallelism the first call of a form looks at what experts draw.
            warnings.filterwarnings("ignore", ".* what it draws is not predicted")
            made = model(**batch)
        loss = made if isinstance(made, Tensor) else made.loss
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        if not step:
            named: Any = model.named_parameters()
            found |= {n: whole(p.grad).clone() for n, p in named if p.grad is not None}
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"{n} at the end": whole(p).clone() for n, p in model.named_parameters()}
    return found, compile_report(model) if is_compiled else {}
