"""What the token means of a module count, known before any micro-batch is differentiated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._loss.token_mean import TokenCounts

from .stage_module import StageRun, Staging


def run_counting(
    forward: Callable[..., Any],
    microbatch: tuple[tuple[Any, ...], Mapping[str, Any]],
    staging: Staging,
    run: StageRun | None,
    device_type: str,
) -> tuple[Any, list[Tensor]]:
    """Return what forward returns of one micro-batch, and what its token means count.

    Nothing is kept for backward, and nothing is drawn from generators. In ``run`` modules may
    give placeholders; None runs all of the model.
    """
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    args, kwargs = microbatch
    staging.run = run
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), TokenCounts() as mode:
            return forward(*args, **kwargs), mode.counts
    finally:
        staging.run = None


def summed_counts(found: Sequence[Sequence[Tensor]], *, otherwise: str) -> list[Tensor]:
    """Return what each token mean counts in all micro-batches together.

    Raises:
        ValueError: If micro-batches have other numbers of them; ``otherwise`` is what then helps.
    """
    if len({len(counts) for counts in found}) > 1:
        raise ValueError(
            "expected as many token-mean losses in every micro-batch, got "
            f"{[len(counts) for counts in found]}; compute them unconditionally, or use "
            f"{otherwise}"
        )
    return [torch.stack(counts).sum(0) for counts in zip(*found, strict=True)]
