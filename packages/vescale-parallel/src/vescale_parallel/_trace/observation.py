"""What one forward of a model did, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ModuleObservation:
    """One call of a module, the calls inside of it included.

    Attributes:
        fqn: Its name, empty for the model itself.
        inputs: Shapes of the tensors among its arguments, positional ones first.
        outputs: Shapes of the tensors that it returned.
        flops: Of its forward.
        saved_bytes: Kept for its backward, if it was the first to keep them.
    """

    fqn: str
    inputs: Shapes
    outputs: Shapes
    flops: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class BlockObservation:
    """What one block of the pipeline did for one batch.

    Attributes:
        fqn: Its name.
        numel: Parameter elements.
        flops: Of its forward, and of what ran between it and the next block.
        saved_bytes: Kept for its backward, counted at the block that kept it first.
        output_bytes: Activations it returned: what crosses a cut behind it.
    """

    fqn: str
    numel: int
    flops: int = 0
    saved_bytes: int = 0
    output_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class OutsideObservation:
    """A module outside the blocks that owns parameters.

    Attributes:
        fqn: Its name, empty for the model itself.
        numel: Elements of the parameters that it owns directly, tied ones included.
        position: When its parameters were first used; None if they were not.
    """

    fqn: str
    numel: int
    position: Literal["before", "between", "after"] | None = None


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one forward did, for the rows of the batch that it was given.

    Attributes:
        ran: False without a batch: only ``numel`` and the blocks' ``numel`` are known.
        numel: Parameter elements, tied ones once.
        flops: Of the whole forward, by the rules of ``torch.utils.flop_counter``. Two kernels
            for which it has no rule are counted, too: grouped matrix products, and attention
            on a CPU, by the rule for the same attention on a GPU.
        saved_bytes: Distinct storages kept for backward, parameters and buffers left out.
        output_bytes: Floating-point tensors that the model returned.
        blocks: One for each of :func:`pipeline_blocks`; empty if there is no one list.
        outside: Modules outside the blocks that own parameters, in the order first used;
            empty if there are no blocks.
        modules: Every call of a module, in the order of the calls. A module that was called
            twice appears twice, one that was not called does not.
        uncounted: Operators that take a weight of two or more dims and another tensor, have no
            rule for their flops, and are not known to do no products: ``flops`` lacks theirs.
        before_flops: Part of ``flops`` before the first block.
        after_flops: Part of ``flops`` behind the last block.
        before_saved_bytes: Part of ``saved_bytes`` before the first block.
        after_saved_bytes: Part of ``saved_bytes`` behind the last block.
        rows: Leading dimension of the batch.
        tokens: Positions in the batch: rows x sequence, or rows if there is no sequence.
    """

    ran: bool
    numel: int
    flops: int = 0
    saved_bytes: int = 0
    output_bytes: int = 0
    blocks: tuple[BlockObservation, ...] = ()
    outside: tuple[OutsideObservation, ...] = ()
    modules: tuple[ModuleObservation, ...] = ()
    uncounted: tuple[str, ...] = ()
    before_flops: int = 0
    after_flops: int = 0
    before_saved_bytes: int = 0
    after_saved_bytes: int = 0
    rows: int = 0
    tokens: int = 0
