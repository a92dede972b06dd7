"""What a model is made of: its parameters, its repeated blocks, and where to cut between them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import nn

from vescale_parallel._plan.plan import ModelSignature, ParallelPlan


def model_signature(model: nn.Module) -> ModelSignature:
    """Return what identifies a model to a plan. Global shapes, so any rank says the same."""
    table = [
        (fqn, tuple(parameter.shape), str(parameter.dtype))
        for fqn, parameter in model.named_parameters()
    ]
    return ModelSignature(
        name=type(model).__name__,
        num_parameters=len(table),
        numel=sum(parameter.numel() for parameter in model.parameters()),
        digest=hashlib.sha256(repr(table).encode()).hexdigest()[:16],
    )


def described_values(model: nn.Module) -> dict[str, str]:
    """Return what must agree between ranks for them to hold one and the same model.

    Returns:
        ``parameter_values``: a sum of every tensor that exists; ``random_state``: of the
        default generator, from which deferred tensors get their values and forward its seeds.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sums = [(fqn, float(_sum(tensor))) for fqn, tensor in tensors if type(tensor) in _REAL]
    state = hashlib.sha256(bytes(torch.get_rng_state().tolist())).hexdigest()[:16]
    return {"parameter_values": repr(sums), "random_state": state}


_REAL = (torch.Tensor, nn.Parameter)


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta":
        return torch.zeros(())
    return (
        tensor.detach().sum(dtype=torch.complex128 if tensor.is_complex() else torch.float64).abs()
    )


def check_signature(plan: ParallelPlan, model: nn.Module) -> None:
    """Raise if a plan was made for another model.

    Raises:
        ValueError: With both models' names and sizes.
    """
    if plan.model is None:
        return
    found = model_signature(model)
    if found != plan.model:
        detail = "" if str(found) != str(plan.model) else ", with other names, shapes or dtypes"
        raise ValueError(
            f"the plan was made for {plan.model}, got {found}{detail}; "
            "generate a plan for this model"
        )


def block_stacks(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the FQNs of the blocks of every outermost list of two or more of one class.

    A block is a child with parameters of an ``nn.ModuleList`` or ``nn.Sequential``.
    """
    stacks: list[tuple[str, ...]] = []

    def visit(module: nn.Module, prefix: str) -> None:
        children = list(module.named_children())
        blocks = [
            (name, child) for name, child in children if any(True for _ in child.parameters())
        ]
        repeated = len(blocks) > 1 and len({type(child) for _, child in blocks}) == 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and repeated:
            stacks.append(tuple(prefix + name for name, _ in blocks))
            return
        for name, child in children:
            visit(child, f"{prefix}{name}.")

    visit(model, "")
    return stacks


def pipeline_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the FQNs of the blocks that a pipeline is cut between, in order.

    Raises:
        ValueError: If there is no list of blocks, or more than one that matters.
    """
    stacks = block_stacks(model)
    if not stacks:
        raise ValueError(
            f"pipeline parallelism cuts between the blocks of an nn.ModuleList or "
            f"nn.Sequential, and {type(model).__name__} has none of two or more blocks"
        )
    sizes = [
        sum(p.numel() for fqn in s for p in model.get_submodule(fqn).parameters()) for s in stacks
    ]
    large = [stack for stack, size in zip(stacks, sizes, strict=True) if 5 * size >= max(sizes)]
    if len(large) > 1:
        names = [stack[0].rpartition(".")[0] for stack in large]
        raise ValueError(
            f"pipeline parallelism supports one list of blocks, {type(model).__name__} has "
            f"{len(large)}: {names}; use another parallelism"
        )
    return large[0]


def split_blocks(weights: Sequence[float], num_stages: int) -> list[int]:
    """Cut a sequence into consecutive parts so that the heaviest part is lightest.

    Args:
        weights: Cost of each block, in order.
        num_stages: Number of parts, none empty.

    Returns:
        Index of the first block of every part.

    Raises:
        ValueError: If there are fewer blocks than parts.

    Example:
        >>> split_blocks([1, 1, 1, 3], 2)
        [0, 3]
    """
    if num_stages > len(weights):
        raise ValueError(
            f"expected at most as many pipeline stages as blocks ({len(weights)}), "
            f"got {num_stages}"
        )
    totals = [0.0]
    for weight in weights:
        totals.append(totals[-1] + weight)
    # best[k][i]: lightest heaviest part when the first i blocks make k parts, and its cut.
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * len(weights)]
    for parts in range(1, num_stages + 1):
        row: list[tuple[float, int]] = [(float("inf"), 0)] * (len(weights) + 1)
        for end in range(parts, len(weights) + 1):
            row[end] = min(
                (max(best[parts - 1][cut][0], totals[end] - totals[cut]), cut)
                for cut in range(parts - 1, end)
            )
        best.append(row)
    starts: list[int] = []
    end = len(weights)
    for parts in range(num_stages, 0, -1):
        end = best[parts][end][1]
        starts.insert(0, end)
    return starts


def stage_starts(plan: ParallelPlan, model: nn.Module, blocks: Sequence[str]) -> list[int]:
    """Return the index of the first block of every stage.

    Raises:
        ValueError: If split points name no block, are out of order, or are too few or many,
            or there are more stages than blocks.
    """
    pipeline = plan.pipeline_parallel
    if pipeline.num_stages > len(blocks):
        raise ValueError(
            f"expected at most {len(blocks)} pipeline stages, one per block of "
            f"{type(model).__name__}, got {pipeline.num_stages} (pipeline_parallel.size "
            f"{pipeline.size} x virtual_stages {pipeline.virtual_stages})"
        )
    if not pipeline.split_points:
        uniform = pipeline.split_method != "parameters"
        weights = [
            1.0
            if uniform
            else float(sum(p.numel() for p in model.get_submodule(fqn).parameters()))
            for fqn in blocks
        ]
        return split_blocks(weights, pipeline.num_stages)
    if len(pipeline.split_points) != pipeline.num_stages - 1:
        raise ValueError(
            f"expected {pipeline.num_stages - 1} pipeline_parallel.split_points for "
            f"{pipeline.num_stages} stages, got {len(pipeline.split_points)}"
        )
    unknown = [point for point in pipeline.split_points if point not in blocks]
    if unknown:
        raise ValueError(
            f"pipeline_parallel.split_points: {unknown[0]!r} is no block of "
            f"{type(model).__name__}; blocks are {blocks[0]!r} to {blocks[-1]!r}"
        )
    starts = [0, *(list(blocks).index(point) for point in pipeline.split_points)]
    if starts != sorted(set(starts)):
        raise ValueError(
            f"expected pipeline_parallel.split_points in the order of the blocks, none the "
            f"first block, got {pipeline.split_points}"
        )
    return starts
