"""Parameters are gathered, and cast, again only after they have changed, in whatever way."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale
from vescale_dtensor import CommCounter, GatherWarning
from vescale_parallel import ParallelPlan, with_constraints
from vescale_testing import World

pytestmark = pytest.mark.slow

WIDTH = 9  # a width that does not divide, and of which both ranks have some in any dtype
HALF = {"precision.param": "bfloat16"}


class Net(nn.Module):
    """Three groups of parameters: two blocks and the rest, which is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, is_training: bool = False) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        return x.pow(2).mean() if is_training else x


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _parallel(stage: int, **constraints: Any) -> tuple[Any, Any, Tensor]:
    """Return a model, its optimizer and the rows of this rank."""
    size = {"data_parallel.size": dist.get_world_size(), "data_parallel.zero_stage": stage}
    plan = with_constraints(ParallelPlan(), {**size, **constraints})
    model, optimizer = vescale.parallelize(
        plan, _net(), lambda m: torch.optim.AdamW(m.parameters(), lr=0.1)
    )
    rows = torch.arange(2.0 * WIDTH, dtype=torch.float64).view(2, WIDTH) / 20
    return model, optimizer, rows + dist.get_rank()


def _gathers(model: Any, rows: Tensor) -> int:
    """Return how many groups of parameters a call without gradients gathers.

    What it returns has to be what one device returns, bit for bit.
    """
    with CommCounter() as counter, torch.no_grad():
        found = model(rows)
    plain = _net()
    plain.load_state_dict({n: p.full_tensor().clone() for n, p in model.state_dict().items()})
    with torch.no_grad():
        wanted = plain.to(found.dtype)(rows.to(found.dtype))
    assert torch.equal(found, wanted)
    return sum(event.kind == "all_gather" and event.nbytes > 16 for event in counter.events)


def _again(model: Any, rows: Tensor) -> list[int]:
    """Return the gathers of three calls; ``full_tensor`` of some parameters is no view of them."""
    return [_gathers(model, rows) for _ in range(3)]


def gathers_of_two_steps(stage: int, half: dict[str, str]) -> list[int]:
    model, optimizer, rows = _parallel(stage, **half)
    found: list[int] = []
    for _ in range(2):
        found += _again(model, rows)
        for _ in range(2):  # accumulated in the loop
            model(rows, True).backward()
        found.append(_gathers(model, rows))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, _gathers(model, rows)]


@pytest.mark.by_day("1-bfloat16", "2-", "2-bfloat16")
@pytest.mark.parametrize("half", [{}, HALF], ids=["", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2])
def test_evaluation_and_accumulation_gather_once_after_a_step(
    world2: World, stage: int, half: dict[str, str]
) -> None:
    assert world2.run(gathers_of_two_steps, stage, half) == [[3, 0, 0, 0] * 2 + [3]] * 2


def _copied(model: Any, weight: Any) -> None:
    weight.copy_(weight * 2)


def _clipped(model: Any, weight: Any) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def _set_state(model: Any, weight: Any) -> None:
    model.load_state_dict({n: (p * 2).detach() for n, p in model.state_dict().items()})


def _set_of_state(model: Any, weight: Any) -> None:
    model.state_dict()["blocks.0.0.weight"].mul_(2)


def _broadcast(model: Any, weight: Any) -> None:
    dist.all_reduce(weight.to_local()[:2])


def _broadcast_whole(model: Any, weight: Any) -> None:
    dist.all_reduce(weight.data.detach().to_local()[:2])


def _numpy(model: Any, weight: Any) -> None:
    weight.to_local().numpy()[:] *= 2


def _numpy_of_data(model: Any, weight: Any) -> None:
    weight.data.to_local().data.numpy()[:] *= 2


def _under_grad(model: Any, weight: Any) -> None:
    with torch.enable_grad():
        local = weight.to_local()
    local.detach().numpy()[:] *= 2


def _in_inference(model: Any, weight: Any) -> None:
    with torch.inference_mode():
        weight.mul_(2)


def _averaged(model: Any, weight: Any) -> None:
    average = [p.detach().clone() for p in model.parameters()]
    torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)(average, [p * 3 for p in average], None)
    for parameter, of_average in zip(model.parameters(), average, strict=True):
        parameter.copy_(of_average)


def _optimizer(cls: Any, **options: Any) -> Callable[[Any, Any], None]:
    def step(model: Any, weight: Any) -> None:
        """An optimizer that was made by hand, and has gradients of its own."""
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 2
        with warnings.catch_warnings(action="ignore", category=GatherWarning):  # of fused ones
            cls(model.parameters(), lr=0.1, **options).step()
        model.zero_grad()

    return step


# What programs change parameters by; and of how many groups.
CHANGES: dict[str, tuple[Callable[[Any, Any], object], int]] = {
    "in place": (lambda model, weight: weight.mul_(2), 1),
    "data": (lambda model, weight: weight.data.mul_(2), 1),
    "row": (lambda model, weight: weight.data[0].mul_(2), 1),
    "detached": (lambda model, weight: weight.detach().mul_(2), 1),
    "copied": (_copied, 1),
    "list": (lambda model, weight: torch._foreach_mul_([weight], 2), 1),  # pyright: ignore[reportPrivateImportUsage]
    "local": (lambda model, weight: weight.to_local().mul_(2), 1),
    "local data": (lambda model, weight: weight.to_local().data.mul_(2), 1),
    "filled": (lambda model, weight: nn.init.constant_(weight, 2), 1),
    "drawn": (lambda model, weight: nn.init.normal_(weight), 1),
    "inference": (_in_inference, 1),
    "clipped": (_clipped, 3),
    "state": (_set_state, 3),
    "of the state": (_set_of_state, 1),
    "average": (_averaged, 3),
    "collective": (_broadcast, 1),
    "collective of a view": (_broadcast_whole, 1),
    "numpy": (_numpy, 1),
    "numpy of data": (_numpy_of_data, 1),
    "under grad": (_under_grad, 1),
    "foreach": (_optimizer(torch.optim.AdamW, foreach=True), 3),
    "fused": (_optimizer(torch.optim.AdamW, fused=True), 3),
    "loop": (_optimizer(torch.optim.SGD, foreach=False), 3),
}


def gathers_after_changes(stage: int, half: dict[str, str]) -> dict[str, list[int]]:
    model, _, rows = _parallel(stage, **half)
    _gathers(model, rows)
    found: dict[str, list[int]] = {}
    before = copy.deepcopy({n: p.detach() for n, p in model.state_dict().items()})
    for name, (change, _) in CHANGES.items():
        with torch.no_grad():
            change(model, model.blocks[0][0].weight)
        after, again = _gathers(model, rows), _gathers(model, rows)
        model.load_state_dict(before)
        _gathers(model, rows)
        found[name] = [after, again]
    return found


@pytest.mark.by_day("0-half0", "2-half3")
@pytest.mark.parametrize(
    ("stage", "half"), [(0, {}), (0, HALF), (1, HALF), (2, {}), (3, {}), (3, HALF)]
)
def test_a_change_of_any_kind_is_seen_by_the_next_call(
    world2: World, stage: int, half: dict[str, str]
) -> None:
    kept = {name: [num_groups, 0] for name, (_, num_groups) in CHANGES.items()}
    if stage in (0, 3):  # nothing is gathered, or everything
        kept = {name: [stage, stage] for name in kept}
    assert world2.run(gathers_after_changes, stage, half) == [kept] * 2


def gathers_with_kept_views(stage: int) -> dict[str, list[int]]:
    model, _, rows = _parallel(stage, **HALF)
    views = {
        "local": lambda: model.blocks[0][0].weight.to_local(),
        "data": lambda: model.blocks[0][0].weight.to_local().data,
        "numpy": lambda: model.blocks[0][0].weight.to_local().numpy(),
    }
    found: dict[str, list[int]] = {}
    for name, take in views.items():
        with torch.no_grad():
            view: Any = take()  # kept from before the loop
            found[name] = _again(model, rows)
            if name == "numpy":
                view[:] *= 2
            else:
                dist.all_reduce(view[:2])
            found[name] += _again(model, rows)
        del view
        found[name] += _again(model, rows)
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_what_somebody_has_a_view_of_is_gathered_in_every_call(world2: World, stage: int) -> None:
    found = world2.run(gathers_with_kept_views, stage)
    first = [1] * 6 + [0] * 3
    expected = {"local": [3, 1, 1, *first[3:]], "data": first, "numpy": first}
    assert found == [expected if stage else {name: [0] * 9 for name in expected}] * 2


def gathers_after_a_write_on_rank_0(stage: int) -> list[int]:
    model, _, rows = _parallel(stage)
    _again(model, rows)
    found: list[int] = []
    for change, _ in (CHANGES["in place"], CHANGES["local"], CHANGES["numpy"]):
        if dist.get_rank() == 0:
            with torch.no_grad():
                change(model, model.blocks[1][0].weight)
        found += _again(model, rows)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_what_one_rank_alone_writes_is_gathered_on_all(world2: World, stage: int) -> None:
    assert world2.run(gathers_after_a_write_on_rank_0, stage) == [[1, 0, 0] * 3] * 2


def gathers_after_a_step_of_rank_0() -> list[int]:
    model, optimizer, rows = _parallel(1)
    model(rows, True).backward()
    if dist.get_rank() == 0:
        optimizer.step()
    return _again(model, rows)


def test_a_step_of_one_rank_alone_is_gathered_on_all(world2: World) -> None:
    assert world2.run(gathers_after_a_step_of_rank_0) == [[3, 0, 0]] * 2


def gathers_after_loads(path: Path) -> list[int]:
    model, optimizer, rows = _parallel(1)
    vescale.save(str(path), {"model": model, "optimizer": optimizer})
    model(rows, True).backward()
    optimizer.step()
    found = [_gathers(model, rows)]
    vescale.load(str(path), {"model": model, "optimizer": optimizer})
    return [*found, _gathers(model, rows), _gathers(model, rows)]


def test_a_checkpoint_that_is_loaded_is_seen_by_the_next_call(
    world2: World, tmp_path: Path
) -> None:
    assert world2.run(gathers_after_loads, tmp_path / "ckpt") == [[3, 3, 0]] * 2


def gathers_with_a_frozen_block() -> list[int]:
    model, optimizer, rows = _parallel(1)
    model.blocks[0].requires_grad_(False)
    found: list[int] = []
    for _ in range(2):
        found.append(_gathers(model, rows))
        model(rows, True).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_a_frozen_block_is_gathered_once(world2: World) -> None:
    assert world2.run(gathers_with_a_frozen_block) == [[3, 2]] * 2


def casts() -> list[bool]:
    model, optimizer, rows = _parallel(0, **HALF)
    unsharded = model._vescale_engine.parameters.params[0].unsharded

    def is_cast() -> bool:
        """Whether a call replaces what was written behind its back."""
        unsharded.data.zero_()
        with torch.no_grad():
            model(rows)
        return bool(unsharded.any())

    with torch.no_grad():
        model(rows)  # before it there is no memory to write to
    found = [is_cast()]
    with torch.no_grad():
        model.first.weight.add_(1)
    found += [is_cast(), is_cast()]
    model(rows, True).backward()
    optimizer.step()
    return [*found, is_cast(), is_cast()]


def test_parameters_are_cast_again_only_after_they_changed(world2: World) -> None:
    assert world2.run(casts) == [[False, *[True, False] * 2]] * 2
