"""One training loop, for one device and for every plan, and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

import vescale
from vescale_dtensor import DTensor
from vescale_parallel import with_constraints

from .models import batches, build

ROWS = 8  # of the global batch


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What to train and how, apart from the plan.

    Attributes:
        model: A name that :func:`integration_tests.models.build` knows.
        dtype: Of the parameters.
        steps: Optimizer steps.
        uneven: Whether rows have different numbers of targets that count.
        optimizer: A key of ``OPTIMIZERS``.
        accumulate: Backward passes before each optimizer step.
        loss_factor: What the loss is multiplied with before backward.
        evaluate: Whether to evaluate in eval mode before every step.
        deferred: Whether the model's construction is deferred.
        exact: Whether to compute in float64 from parameters that were drawn as ``dtype``.
        reversed_rows: Whether the rows of every batch come in the opposite order.
        in_halves: Whether linear layers add two products of half their input features, which is
            how two tensor-parallel ranks round.
        device: Where to train. Parameters are drawn on the CPU.
        compiled: The backend of torch.compile that compiles the blocks, on one device and under
            a plan; empty to run them as they are written.
    """

    model: str
    dtype: Literal["float64", "float32"] = "float64"
    steps: int = 5
    uneven: bool = True
    optimizer: str = "adamw"
    accumulate: int = 1
    loss_factor: float = 1.0
    evaluate: bool = False
    deferred: bool = False
    exact: bool = False
    reversed_rows: bool = False
    in_halves: bool = False
    device: str = "cpu"
    compiled: str = ""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a training run reported, step by step, and the full parameters at its end."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    parameters: dict[str, Tensor]


def _adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def _momentum(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def _decay_groups(model: nn.Module) -> Optimizer:
    """Decay matrices only, told apart by their global number of dims."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return AdamW(
        [
            {"params": matrices, "weight_decay": 0.5},
            {"params": others, "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": _adamw,
    "momentum": _momentum,
    "decay_groups": _decay_groups,
}


def samples(
    num_batches: int, rows: int = ROWS, *, uneven: bool = False
) -> list[dict[str, Tensor]]:
    """Return the rows of ``num_batches`` global batches, in order, as a data set."""
    return [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in batches(num_batches, rows, uneven=uneven)
        for row in range(rows)
    ]


def make_model(recipe: Recipe) -> nn.Module:
    """Construct the recipe's model, the same each time."""
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, recipe.dtype))
    try:
        model = (
            vescale.deferred_init(build, recipe.model) if recipe.deferred else build(recipe.model)
        )
        model = model.double() if recipe.exact else model
        return model if recipe.deferred else model.to(recipe.device)
    finally:
        torch.set_default_dtype(torch.float32)


def linear_in_halves(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``, rounded as two tensor-parallel ranks round it."""
    half = x.shape[-1] // 2
    result = x[..., :half] @ weight[:, :half].mT + x[..., half:] @ weight[:, half:].mT
    return result if bias is None else result + bias


def train(recipe: Recipe, constraints: Mapping[str, Any] | None = None) -> Record:
    """Train as on one device; with constraints, under the plan that they make.

    Args:
        recipe: What to train and how.
        constraints: Fields of the plan; None to do without a plan altogether.
    """
    model = make_model(recipe)
    optimizer_fn = OPTIMIZERS[recipe.optimizer]
    dataset = samples(recipe.steps * recipe.accumulate, uneven=recipe.uneven)
    loader: Any
    if recipe.compiled and constraints is not None:
        constraints = {**constraints, "compile": "blocks", "compile_backend": recipe.compiled}
    elif recipe.compiled:
        compile_in_place(model, recipe.compiled)
    if constraints is None:
        optimizer = optimizer_fn(model)
        loader = DataLoader(dataset, batch_size=ROWS)  # pyright: ignore[reportArgumentType]: a list is a data set
    else:
        plan = with_constraints(vescale.ParallelPlan(), {"batch.global_size": ROWS, **constraints})
        model, optimizer, loader = vescale.parallelize(plan, model, optimizer_fn, None, dataset)
    losses: list[float] = []
    norms: list[float] = []
    evaluations: list[float] = []
    for index, batch in enumerate(loader):
        batch = {name: tensor.to(recipe.device) for name, tensor in batch.items()}
        if recipe.reversed_rows:
            batch = {name: tensor.flip(0) for name, tensor in batch.items()}
        if recipe.evaluate:
            model.eval()
            with torch.no_grad():
                evaluations.append(model(batch).item())
            model.train()
        if recipe.in_halves:
            with mock.patch.object(torch.nn.functional, "linear", linear_in_halves):
                loss = model(batch)
        else:
            loss = model(batch)
        losses.append(loss.item())
        (loss * recipe.loss_factor).backward()
        if (index + 1) % recipe.accumulate:
            continue
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return Record(
        losses=losses,
        norms=norms,
        evaluations=evaluations,
        parameters={name: whole(p).cpu() for name, p in model.named_parameters()},
    )


def compile_in_place(model: nn.Module, backend: str) -> None:
    """Compile the blocks of a model of one device."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                block.compile(backend=backend)


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter's values, gathered if it is distributed."""
    values = parameter.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values
