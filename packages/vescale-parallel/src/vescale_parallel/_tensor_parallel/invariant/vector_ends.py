"""Where vectors end: kernels of CPUs compute the last elements of a tensor otherwise.

An activation function of torch computes what does not fill a vector with other instructions,
whose last bits differ (``F.silu``, ``F.gelu``, ``torch.sigmoid``). Which elements these are
depends on how many there are in a row of memory. So all chunks must fill vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vescale_parallel._tensor_parallel.chunks import Parts, lengths_within

# Two vectors of the longest registers there are: kernels step so far.
_STEP_NBYTES = 128


def check_ends(y: Tensor, num_chunks: int, parts: Parts, fqn: str) -> None:
    """Raise if ranks would compute other elements of a layer's output one by one.

    Raises:
        ValueError: With how long chunks are, and have to be.
    """
    if y.device.type != "cpu":
        return
    threads = torch.get_num_threads()
    if threads > 1:
        raise ValueError(
            f"numerics 'invariant' on the CPU needs one thread a rank, which decides where "
            f"vectors end: expected torch.get_num_threads() 1, got {threads}; "
            "set OMP_NUM_THREADS=1"
        )
    # Of parts that are cut one by one a program takes views, whose rows are vectors by themselves.
    step = _STEP_NBYTES // y.itemsize
    for length in dict.fromkeys(lengths_within(parts, y.shape[-1] // num_chunks)):
        run = length if parts != 1 else y.numel() // num_chunks
        if not run % step:
            continue
        what = "its output features in a chunk" if parts != 1 else "elements of a chunk"
        raise ValueError(
            f"numerics 'invariant': on the CPU {what} must be a multiple of {step} for {y.dtype}, "
            f"or vectors end at other elements on other numbers of ranks: {fqn!r} has {run} "
            f"({length} features); use fewer numerics_chunks, or other sizes"
        )
