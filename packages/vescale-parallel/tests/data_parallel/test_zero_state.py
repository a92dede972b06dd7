"""A step of ZeRO 1, 2 and 3: what hangs on the modules, what is in memory, what is sent."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import CommCounter, DTensor
from vescale_parallel import ParallelPlan, parallelize, with_constraints

InThreads = Callable[[int, Callable[[int], Any]], list[Any]]
WORLD, WIDTH = 2, 5  # a width that does not divide
ROWS = torch.arange(4.0 * WIDTH, dtype=torch.float64).view(4, WIDTH) / 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.seen: Callable[[str], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        seen = self.seen
        if seen is None:
            return torch.tanh(self.linear(x))
        seen("forward")
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda _: seen("backward"))
        return torch.tanh(x)


class Net(nn.Module):
    """Two blocks, and a head whose weight a third use shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).pow(2).mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def rows_of(rank: int) -> Tensor:
    return ROWS[2 * rank : 2 * rank + 2]


def parallel(rank_model: nn.Module, stage: int, **constraints: Any) -> Any:
    plan = with_constraints(
        ParallelPlan(),
        {"data_parallel.size": WORLD, "data_parallel.zero_stage": stage, **constraints},
    )
    return parallelize(plan, rank_model)


def wholes(model: nn.Module) -> dict[str, Tensor | None]:
    """Return the gradients of all ranks, put together. Every rank must call this."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[name] = None if grad is None else grad.full_tensor()
    return found


def assert_close(got: dict[str, Tensor | None], expected: nn.Module, times: float = 1.0) -> None:
    for name, parameter in expected.named_parameters():
        grad = got[name]
        assert (grad is None) == (parameter.grad is None), name
        if grad is not None and parameter.grad is not None:
            # The mean of two halves is the mean of the whole up to rounding.
            assert torch.allclose(grad, times * parameter.grad, rtol=0, atol=1e-12), name


class OwnCounter(CommCounter):
    """Counts what its own thread, which is a rank, sends."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def _hear(self, event: Any) -> None:
        if threading.get_ident() == self._thread:
            super()._hear(event)

    def kinds(self) -> Counter[str]:
        return Counter(event.kind for event in self.events)


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


def _of_linear(model: Any, index: int) -> nn.Parameter:
    return model.blocks[index].linear._parameters["weight"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_hangs_on_the_modules_at_each_moment(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> list[tuple[str, bool, bool, bool]]:
        model = parallel(models[rank], stage)
        seen: list[tuple[str, bool, bool, bool]] = []

        def look(when: str) -> None:
            held = [_of_linear(model, 0), _of_linear(model, 1), model.first._parameters["weight"]]
            seen.append((when, *(isinstance(each, DTensor) for each in held)))  # pyright: ignore[reportArgumentType]

        look("before")
        for index, block in enumerate(model.blocks):
            block.seen = lambda when, index=index: look(f"{when} {index}")
        loss = model(rows_of(rank))
        look("between")
        loss.backward()
        look("after")
        return seen

    whole = stage > 1  # a block that does not run shows what everybody sees
    for seen in in_threads(WORLD, step):
        assert seen == [
            ("before", True, True, True),
            ("forward 0", False, whole, False),
            ("forward 1", whole, False, False),
            ("between", True, True, True),
            ("backward 1", whole, False, False),
            ("backward 0", False, whole, False),
            ("after", True, True, True),
        ]


def _bytes_of(model: Any) -> int:
    """Return the memory of the parameters that compute, without what is the public one's own."""
    params = model._vescale_engine.parameters.params
    return sum(p.unsharded.untyped_storage().size() for p in params if not p.shares_storage)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_of_gathered_parameters_at_each_moment(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]
    of_root, of_block = 8 * WIDTH * WIDTH, 8 * (WIDTH * WIDTH + WIDTH)

    def step(rank: int) -> list[int]:
        model, seen = parallel(models[rank], stage), list[int]()
        for block in model.blocks:
            block.seen = lambda _: seen.append(_bytes_of(model))
        loss = model(rows_of(rank))
        seen.append(_bytes_of(model))
        loss.backward()
        seen.append(_bytes_of(model))
        with torch.no_grad():
            model(rows_of(rank))
        return [*seen[:6], _bytes_of(model)]

    # forward of both blocks, between, backward of both, after, and after one without gradients
    everything, one = of_root + 2 * of_block, of_root + of_block
    expected = [one, one, of_root, one, one, 0, 0] if stage == 3 else [everything] * 7
    for seen in in_threads(WORLD, step):
        assert seen == expected


def test_parallelize_itself_takes_no_memory_for_gathered_parameters(
    in_threads: InThreads,
) -> None:
    models = [net() for _ in range(WORLD)]
    assert in_threads(WORLD, lambda rank: _bytes_of(parallel(models[rank], 3))) == [0, 0]


# All-gathers in forward, of blocks again in backward at ZeRO 3, and of flags of what was used;
# reduce-scatters, which are all-to-alls summed in rank order.
GATHERED = {1: 3, 2: 3, 3: 3 + 2}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_step_sends(in_threads: InThreads, stage: int) -> None:
    models = [net() for _ in range(WORLD)]

    def step(rank: int) -> tuple[Counter[str], int, int]:
        model = parallel(models[rank], stage)
        model(rows_of(rank)).backward()  # calls are proven in their first one
        counter = OwnCounter()
        with counter:
            loss = model(rows_of(rank))
            at = len(counter.events)
            loss.backward()
        sent = [event for event in counter.events if event.dtype == torch.float64]
        gathers = [event for event in sent if event.kind == "all_gather"]
        nbytes = sum(event.nbytes for event in gathers)
        return Counter(event.kind for event in sent), nbytes, at

    # Of a gather one rank sends its part, padded to three rows, and a tag; the loss besides.
    root, block = 8 * (3 * WIDTH + 1), 8 * (3 * WIDTH + 3 + 1)
    gathered = root + 2 * block * (2 if stage == 3 else 1)
    for kinds, nbytes, _ in in_threads(WORLD, step):
        assert kinds["all_to_all"] == 3
        assert kinds["all_gather"] == GATHERED[stage] + 1
        assert nbytes == gathered + 8


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_forward_that_raised_leaves_the_model_as_it_was(
    in_threads: InThreads, stage: int
) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    expected(ROWS).backward()

    def fail(when: str) -> None:
        raise KeyError("in forward")

    def steps(rank: int) -> tuple[bool, int, dict[str, Tensor | None]]:
        model = parallel(models[rank], stage)
        model.blocks[1].seen = fail
        with pytest.raises(KeyError, match="in forward"):
            model(rows_of(rank))
        shown = all(isinstance(p, DTensor) for p in model.parameters())
        nbytes = _bytes_of(model)
        model.blocks[1].seen = None
        model(rows_of(rank)).backward()
        return shown, nbytes, wholes(model)

    for shown, nbytes, got in in_threads(WORLD, steps):
        assert shown
        if stage == 3:  # what is outside of blocks, which backward would need
            assert nbytes == 8 * WIDTH * WIDTH
        assert_close(got, expected)


class Failing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise KeyError("in backward")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_call_after_a_backward_that_raised_has_the_right_gradients(
    in_threads: InThreads, stage: int
) -> None:
    expected, models = net(), [net() for _ in range(WORLD)]
    expected(ROWS).backward()

    def steps(rank: int) -> dict[str, Tensor | None]:
        model = parallel(models[rank], stage)
        # Between the blocks, so that the second one has gradients when it raises.
        hook = model.blocks[0].register_forward_hook(lambda _m, _a, out: Failing.apply(out))
        with pytest.raises(KeyError, match="in backward"):
            model(rows_of(rank)).backward()
        hook.remove()
        model(rows_of(rank)).backward()
        return wholes(model)

    for got in in_threads(WORLD, steps):
        assert_close(got, expected)


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
        with pytest.raises(ValueError, match="ranks ran different blocks of the model"):
            model(rows_of(rank)).backward()

    in_threads(WORLD, step)


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
