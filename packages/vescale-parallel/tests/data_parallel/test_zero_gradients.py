"""Gradients under ZeRO 1, 2 and 3: those of one device, and what hooks see of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor

from .zero_model import (
    ROWS,
    WIDTH,
    WORLD,
    OwnCounter,
    assert_close,
    net,
    parallel,
    rows_of,
    wholes,
)

InThreads = Callable[..., list[Any]]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_those_of_one_device(in_threads: InThreads, stage: int) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    expected(ROWS).backward()

    def step(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage)
        model(rows_of(rank)).backward()
        return wholes(model)

    for got in in_threads(WORLD, step):
        assert_close(got, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_backwards_add_up(in_threads: InThreads, stage: int) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    expected(ROWS).backward()

    def steps(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage)
        for _ in range(2):
            model(rows_of(rank)).backward()
        return wholes(model)

    for got in in_threads(WORLD, steps):
        assert_close(got, expected, times=2.0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_backward_through_two_calls_adds_up(in_threads: InThreads, stage: int) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    (expected(ROWS) + expected(ROWS * 2)).backward()

    def step(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage)
        (model(rows_of(rank)) + model(rows_of(rank) * 2)).backward()
        return wholes(model)

    for got in in_threads(WORLD, step):
        assert_close(got, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_and_unused_parameters_have_no_gradient(in_threads: InThreads, stage: int) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    for model in (expected, *models):
        model.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        model.blocks[0].linear.weight.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    expected(ROWS).backward()

    def step(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage)
        model(rows_of(rank)).backward()
        return wholes(model)

    for got in in_threads(WORLD, step):
        assert got["unused"] is None
        assert got["blocks.0.linear.weight"] is None
        assert_close(got, expected)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_on_one_rank_alone_is_averaged_with_zeros(
    in_threads: InThreads, stage: int
) -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(WIDTH, 1, dtype=torch.float64)
            self.two = nn.Linear(WIDTH, 1, dtype=torch.float64)
            self.use_one = True

        def forward(self, x: Tensor) -> Tensor:
            return (self.one if self.use_one else self.two)(x).mean()

    models = [Choosy() for _ in range(WORLD)]
    models[1].load_state_dict(models[0].state_dict())
    alone = copy.deepcopy(models[0])
    alone(rows_of(0)).backward()

    def step(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage)
        model.use_one = rank == 0
        model(rows_of(rank)).backward()
        return wholes(model)

    for got in in_threads(WORLD, step):
        assert got["one.weight"] is not None
        assert got["two.weight"] is not None
        assert torch.equal(got["one.weight"], alone.one.weight.grad / 2)  # pyright: ignore[reportOptionalOperand]


def _hooked(model: nn.Module, calls: list[tuple[str, bool, Sequence[int]]]) -> None:
    for name, parameter in model.named_parameters():
        if name in ("first.weight", "blocks.0.linear.weight"):
            parameter.register_hook(
                lambda grad, name=name: calls.append((name, isinstance(grad, DTensor), grad.shape))
            )
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: calls.append(
                    (f"{name} after", isinstance(p.grad, DTensor), p.shape)
                )
            )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradient_hooks_run_once_on_the_whole_gradient(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> list[tuple[str, bool, Sequence[int]]]:
        model = parallel(models[rank], stage)
        calls: list[tuple[str, bool, Sequence[int]]] = []
        _hooked(model, calls)
        model(rows_of(rank)).backward()
        return calls

    whole = torch.Size([WIDTH, WIDTH])
    for calls in in_threads(WORLD, step):
        assert calls == [
            ("first.weight", True, whole),
            ("first.weight after", True, whole),
            ("blocks.0.linear.weight", True, whole),
            ("blocks.0.linear.weight after", True, whole),
        ]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_gradient_hook_may_return_another_gradient(in_threads: InThreads, stage: int) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    for model in (expected, *models):
        model.blocks[0].linear.weight.register_hook(lambda grad: grad * 3)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    expected(ROWS).backward()

    def step(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage)
        model(rows_of(rank)).backward()
        return wholes(model)

    for got in in_threads(WORLD, step):
        assert_close(got, expected)


def test_gradients_that_no_backward_summed_are_refused(in_threads: InThreads) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> None:
        model = parallel(models[rank], 1)
        param = model._vescale_engine.parameters.params[0]
        param.unsharded.grad = torch.ones_like(param.unsharded)
        with pytest.raises(ValueError, match=r"'first.weight' got a gradient from a backward"):
            model(rows_of(rank))
        model(rows_of(rank)).backward()

    in_threads(WORLD, step)


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_run_other_blocks_are_told(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> None:
        model = parallel(models[rank], stage)
        model(rows_of(rank)).backward()
        if rank == 1:
            blocks = model.blocks._modules
            blocks["0"], blocks["1"] = blocks["1"], blocks["0"]
        told = (
            "ranks ran different blocks of the model at the same time "
            rf"\(rank {rank} another one than rank {1 - rank}\)"
        )
        with pytest.raises(ValueError, match=told):
            model(rows_of(rank)).backward()

    in_threads(WORLD, step, timeout=5.0)


@pytest.mark.parametrize("axis", ["data_parallel.replicate_size", None])
def test_compute_in_half_precision_reduces_in_the_dtype_that_was_said(
    in_threads: InThreads, axis: str | None
) -> None:
    constraints: dict[str, Any] = {"precision.param": "bfloat16", "precision.reduce": "float32"}
    if axis is not None:
        constraints[axis] = WORLD
    models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(WORLD)]
    models[1].load_state_dict(models[0].state_dict())
    expected = copy.deepcopy(models[0]).to(torch.bfloat16)
    x = torch.arange(16.0).view(4, 4) / 16
    halves = [copy.deepcopy(expected) for _ in range(WORLD)]
    for rank, half in enumerate(halves):
        half(x[2 * rank : 2 * rank + 2].to(torch.bfloat16)).float().pow(2).mean().backward()

    class Loss(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.to(torch.bfloat16)).float().pow(2).mean()

    wrapped = [Loss(model) for model in models]

    def step(rank: int) -> dict[str, Tensor | None]:
        model = parallel(wrapped[rank], 2, **constraints)
        model(x[2 * rank : 2 * rank + 2]).backward()
        return wholes(model)

    for got in in_threads(WORLD, step):
        for name, _ in expected.named_parameters():
            grads = [half.get_parameter(name).grad for half in halves]
            total = torch.stack([grad.float() for grad in grads if grad is not None]).sum(0)
            grad = got[f"inner.{name}"]
            assert grad is not None
            assert grad.dtype == torch.float32
            assert torch.equal(grad, total / 2), name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_a_loop_keeps_stay_what_they_are(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def steps(rank: int) -> None:
        model = parallel(models[rank], stage)
        kept: list[tuple[Tensor, Tensor]] = []
        for scale in (1.0, 2.0, 3.0):
            model.zero_grad()
            model(rows_of(rank) * scale).backward()
            local = model.first.weight.grad.to_local()
            kept.append((local, local.clone()))
        assert all(torch.equal(local, copied) for local, copied in kept)
        assert len({local.data_ptr() for local, _ in kept}) == len(kept)

    in_threads(WORLD, steps)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_of_gradients_is_used_again(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def steps(rank: int) -> None:
        model = parallel(models[rank], stage)
        places: set[tuple[int, ...]] = set()
        for _ in range(3):
            model.zero_grad()
            model(rows_of(rank)).backward()
            places.add(tuple(p.grad.to_local().data_ptr() for p in model.parameters()))
        assert len(places) == 1

    in_threads(WORLD, steps)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_that_are_frozen_and_thawed_have_their_gradients(
    in_threads: InThreads, stage: int
) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]

    def steps(rank: int) -> list[dict[str, Tensor | None]]:
        models[rank].blocks[0].requires_grad_(False)
        model = parallel(models[rank], stage)
        found: list[dict[str, Tensor | None]] = []
        for trains in (False, True, False):
            model.blocks[0].requires_grad_(trains)
            model.zero_grad()
            model(rows_of(rank)).backward()
            found.append(wholes(model))
        return found

    of_ranks = in_threads(WORLD, steps)
    for step, trains in enumerate((False, True, False)):
        expected.blocks[0].requires_grad_(trains)
        expected.zero_grad()
        expected(ROWS).backward()
        for found in of_ranks:
            assert_close(found[step], expected)


# Under ZeRO 2 and 3 all ranks run the same blocks.
@pytest.mark.parametrize("stage", [0, 1])
def test_a_parameter_without_gradient_on_one_rank_counts_as_zero(
    in_threads: InThreads, stage: int
) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    (expected.skipping(rows_of(0), 1) / WORLD + expected(rows_of(1)) / WORLD).backward()

    def steps(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage)
        model(rows_of(rank)).backward()  # what buffers held before must not come back
        model.zero_grad()
        model.skips = 1 if rank == 0 else None
        model(rows_of(rank)).backward()
        return wholes(model)

    for got in in_threads(WORLD, steps):
        assert_close(got, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_with_a_graph_are_refused(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> None:
        model = parallel(models[rank], stage)
        with pytest.raises(ValueError, match=r"has a graph, as backward\(create_graph=True\)"):
            model(rows_of(rank)).backward(create_graph=True)
        model(rows_of(rank)).backward()

    in_threads(WORLD, step)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_block_is_reduced_before_the_next_one_runs_backward(
    in_threads: InThreads, stage: int
) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> list[str]:
        model, seen = parallel(models[rank], stage), list[str]()
        for index, block in enumerate(model.blocks):
            block.seen = lambda when, index=index: seen.append(f"{when} {index}")
        loss = model(rows_of(rank))
        seen.clear()
        counter = OwnCounter()
        counter.on_reduction = lambda: seen.append("reduce")
        with counter:
            loss.backward()
        return seen

    # The block, the one before it, and what is outside of blocks. Under ZeRO 2 and 3 a block is
    # reduced when the one before it begins.
    for seen in in_threads(WORLD, step):
        assert seen == ["backward 1", "reduce", "backward 0", "reduce", "reduce"]
