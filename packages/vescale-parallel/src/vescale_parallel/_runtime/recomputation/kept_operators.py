"""What blocks that run again selectively keep: what is expensive to compute and cheap to have.

[Note: what is kept] The results of matrix products with weights, of convolutions, and of fused
attention; everything else runs again: norms, activation functions, dropout, rotary embeddings,
copies, collectives. Products of batches of matrices (``aten.bmm``) run again as well: those of
attention that is not fused give scores for every two positions, which is what recomputation is to
save. A plan's ``recompute_keep`` names what is kept besides. These are the choices of
"selective activation recomputation", https://arxiv.org/abs/2205.05198.

It is torch's own selective checkpointing that keeps them: operators are told apart by their place
in the sequence of calls, so a block has to call the same ones again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from vescale_parallel._plan.operators import checked_overloads, overloads_of

_KEPT = (
    "aten.mm", "aten.addmm", "aten.addmv", "aten.mv", "aten.linear", "aten._scaled_mm",
    "aten._grouped_mm", "aten._scaled_grouped_mm", "aten._addmm_activation", "aten._int_mm",
    "aten.convolution", "aten._convolution",
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip

# Contexts of the first run of a block, and of the second.
Contexts = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


def keep_nothing() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    """Return contexts that keep no operator's results."""
    return contextlib.nullcontext(), contextlib.nullcontext()


def keep_operators(besides: Sequence[str], fqn: str) -> Contexts:
    """Return what makes contexts that keep results; see [Note: what is kept].

    Args:
        besides: Operators that are kept, too.
        fqn: Of the block, for errors.

    Raises:
        ValueError: If there is no such operator, or it writes to its arguments.
    """
    known = [each for name in _KEPT if (each := overloads_of(name))]
    kept = frozenset(op for ops in known for op in ops)
    kept |= {op for name in besides for op in checked_overloads(name)}

    # Of the operator alone: torch 2.11 asks again in the second run.
    def policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_kept = op in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        first, second = cast("tuple[Any, Any]", create_selective_checkpoint_contexts(policy))
        return first, _explained(second, fqn)

    return contexts


@contextlib.contextmanager
def _explained(second: AbstractContextManager[object], fqn: str) -> Iterator[None]:
    """Say of torch's error about a result that was written to which block it is of."""
    try:
        with second:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        raise ValueError(
            f"{fqn!r} writes in place to the result of an operator that recompute 'selective' "
            "keeps, so it is not what it was when the block runs again. Write to no result of a "
            "matrix product, a convolution or attention (nn.ReLU(inplace=True), +=), or give the "
            f"block another mode: recompute={{{fqn!r}: 'full'}}"
        ) from error
