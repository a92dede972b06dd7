"""Calls with lists that have something for every row, whose rows depend on each other."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from vescale_parallel._cross_replica.borders import RowCoupling

# To which the order of rows does not matter.
BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


def over_lists(coupling: RowCoupling, model: nn.Module) -> tuple[RowCoupling, str | None]:
    """Return what of a call can run over the rows of all ranks, and what to warn of, if anything.

    Nobody puts lists of ranks together: each has pictures of its own sizes, and computes what is
    given lists from these, as a loss that a loop computes. Batch norms are given tensors, and run
    over those of all ranks if nothing else is of lists.

    Raises:
        ValueError: If batch norms run beside code that is given lists: how many rows these see on
            each rank is then not known.
    """
    if not coupling.in_lists or not coupling.regions:
        return coupling, None
    regions = {name: x for name, x in model.named_modules() if coupling.is_region(name)}
    norms = [name for name, module in regions.items() if isinstance(module, BATCH_NORMS)]
    listed = {name: coupling.reason(name) for name in regions if name not in norms}
    if not listed:
        return coupling, None
    where = "; ".join(f"{name or 'the model'!r}: {why}" for name, why in listed.items())
    what = (
        f"rows of the batch depend on each other ({where}), and the model is called with lists "
        "that have something for every row, which ranks cannot put together"
    )
    if norms:
        raise ValueError(
            f"{what}, beside batch norms, which would need as many rows on each rank "
            f"({', '.join(map(repr, norms))}). Freeze these (torchvision.ops.FrozenBatchNorm2d), "
            "use another norm, or use data_parallel.size 1"
        )
    return replace(coupling, regions={}), (
        f"{what}: each data-parallel rank computes that from its own rows only, and gradients are "
        "averaged, so the numbers are not those of one device. They are for a loss of which each "
        "row's part divides by what is its own, and for rows that are not padded to the size of "
        "others"
    )


def refused_lists(in_parts_by: str) -> str:
    return (
        "the model is called with lists that have something for every row, which "
        f"{in_parts_by} does not cut into micro-batches. Use pipeline_parallel.size 1 and "
        "batch.gradient_accumulation 1, and accumulate in the loop"
    )
