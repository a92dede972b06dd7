"""Trains a model under plans of several numbers of ranks, and compares the bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import vescale
from vescale_dtensor import DTensor
from vescale_parallel import TensorParallel, propose_in_chunks

ROWS, LENGTH, VOCABULARY = 2, 16, 128


def batches(num_steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [
        torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(num_steps)
    ]
    return [{"input_ids": ids, "labels": ids.roll(-1, 1)} for ids in made]


def said_of(model: nn.Module, chunks: int, *, sequence: bool) -> dict[str, str]:
    return propose_in_chunks(
        model, "auto", chunks, sequence=sequence, example_batch=batches(1)[0]
    ).plan


def trained(
    build: Callable[[], nn.Module],
    said: dict[str, str],
    chunks: int,
    *,
    size: int,
    sequence: bool,
    num_steps: int,
) -> dict[str, Tensor]:
    """Return losses, gradients of every step, and parameters at the end."""
    torch.set_num_threads(1)
    plan = vescale.ParallelPlan(
        tensor_parallel=TensorParallel(size=size, sequence=sequence, sharding_plan=said),
        numerics="invariant",
        numerics_chunks=chunks,
    )
    model, optimizer = vescale.parallelize(
        plan, build(), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    found: dict[str, Tensor] = {}
    for step, batch in enumerate(batches(num_steps)):
        output = model(**batch)
        loss: Tensor = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        found[f"loss {step}"] = loss.detach().clone()
        for fqn, parameter in model.named_parameters():
            found[f"gradient {step} {fqn}"] = whole(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return found | {fqn: whole(p.detach()) for fqn, p in model.named_parameters()}


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def differences(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


def compare_sizes(
    build: Callable[[], nn.Module],
    said: dict[str, str],
    chunks: int,
    *,
    sequence: bool,
    sizes: Iterable[int],
    num_steps: int = 3,
) -> None:
    """Raise unless every number of ranks has the bits of one, and training changes the loss."""
    given: dict[str, Any] = {"sequence": sequence, "num_steps": num_steps}

    def run(size: int) -> list[dict[str, Tensor]]:
        return vescale.emulate(lambda: trained(build, said, chunks, size=size, **given), size)

    (one,) = run(1)
    assert one["loss 0"] != one[f"loss {num_steps - 1}"]
    for size in sizes:
        for rank, found in enumerate(run(size)):
            assert differences(one, found) == [], f"tp {size}, rank {rank}"
