"""What the token means of a module count, known before any micro-batch is differentiated."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vescale_parallel._loss.token_mean import TokenCounts
from vescale_parallel._pipeline.stage_module import StageRun, Staging
from vescale_parallel._torch_private import pytree

from .replay import CountProgram, CountRecorder

MicroBatch = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(eq=False)
class TargetCounts:
    """Counts targets of micro-batches, where possible without running forward.

    Attributes:
        run: Runs forward on a micro-batch, in a mode that sees what it counts.
    """

    run: Callable[[Callable[..., Any], MicroBatch, TokenCounts], object]
    _programs: dict[object, CountProgram | None] = field(
        default_factory=dict[object, "CountProgram | None"]
    )

    def of(
        self, forward: Callable[..., Any], microbatch: MicroBatch, form: object
    ) -> list[Tensor]:
        """Return what the token means of forward count in a micro-batch.

        ``form`` is what else than arguments may decide how; see [Note: when counts are replayed].
        """
        leaves, spec = pytree.tree_flatten(microbatch)
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (form, spec, *map(functools.partial(_kind, leaves), leaves))
        program = self._programs.get(key)
        counts = None if program is None else program.counts(given)
        if counts is not None:
            return counts
        if program is not None or key in self._programs:
            self._programs[key] = None
            self.run(forward, microbatch, mode := TokenCounts())
            return mode.counts
        self.run(forward, microbatch, recorder := CountRecorder(given))
        self._programs[key] = recorder.program() if _are_plain(leaves) else None
        return recorder.counts


def _kind(leaves: Sequence[Any], leaf: Any) -> Hashable:
    """Return what of an argument may decide how targets are made, values of tensors aside."""
    if isinstance(leaf, Tensor):
        # The same tensor twice may be two in another call.
        first = next(index for index, other in enumerate(leaves) if other is leaf)
        return leaf.shape, leaf.dtype, leaf.device, first
    return (type(leaf), leaf) if isinstance(leaf, _PLAIN) else type(leaf)


_PLAIN = (bool, int, float, str, type(None))


def _are_plain(leaves: Sequence[Any]) -> bool:
    """Whether nothing may change behind the back of what arguments are told apart by."""
    return all(type(leaf) is Tensor or isinstance(leaf, _PLAIN) for leaf in leaves)


def run_counting(
    forward: Callable[..., Any],
    microbatch: MicroBatch,
    staging: Staging,
    run: StageRun | None,
    device_type: str,
    mode: TokenCounts | None = None,
) -> tuple[Any, list[Tensor]]:
    """Return what forward returns of one micro-batch, and what its token means count.

    Nothing is kept for backward, and nothing is drawn from generators. In ``run`` modules may
    give placeholders; None runs all of the model. ``mode`` is what counts, None a new one.
    """
    mode = TokenCounts() if mode is None else mode
    devices = [torch.cuda.current_device()] if device_type == "cuda" else []
    args, kwargs = microbatch
    staging.run = run
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), mode:
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
    # One after the other, as the passes that train add them: sums of weights are rounded.
    return [functools.reduce(operator.add, counts) for counts in zip(*found, strict=True)]
