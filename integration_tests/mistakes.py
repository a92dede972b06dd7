"""What people get wrong at first, each as a function that does it."""

from __future__ import annotations

import warnings
from collections import UserDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

import vescale
import vescale_ckpt
from vescale import ParallelPlan
from vescale_parallel import DataParallel, with_constraints

from .plans import DP, PARTS, PP, ZERO, Constraints, make_plan

PLAN = ParallelPlan()


class Net(nn.Module):
    """Takes its batch by name, as models of transformers do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)
        )

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.mean() if labels is None else (x - labels).pow(2).mean()


class TakesBatch(Net):
    """Takes its batch whole."""

    def forward(self, batch: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]: another model
        return super().forward(batch["x"], batch["labels"])


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((8,), float(index)), "labels": torch.zeros(8)}


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def plan(constraints: Any = None, model: Any = None, **kwargs: Any) -> ParallelPlan:
    given: dict[str, Any] = {"world_size": 2, **kwargs}
    return vescale.generate_plan(model or Net(), constraints, **given)


def parallel(*args: Any) -> Any:
    given: tuple[Any, ...] = args or (PLAN, Net())
    return vescale.parallelize(*given)


def anything(value: Any) -> Any:
    """Return a value as one of any type: these programs are wrong on purpose."""
    return value


# Arguments


def class_to_parallelize() -> None:
    parallel(PLAN, Net)


def class_to_generate_plan() -> None:
    vescale.generate_plan(anything(Net), world_size=2)


def swapped_arguments() -> None:
    parallel(Net(), PLAN)


def constraints_for_plan() -> None:
    parallel({DP: 1}, Net())


def text_for_plan() -> None:
    parallel(PLAN.to_json(), Net())


def list_of_models() -> None:
    parallel(PLAN, [Net(), Net()])


def state_dict_for_model() -> None:
    parallel(PLAN, Net().state_dict())


def path_for_json() -> None:
    ParallelPlan.from_json("plans/plan.json")


def number_for_section() -> None:
    ParallelPlan(data_parallel=anything(2))


def constraints_as_text() -> None:
    plan("data_parallel.size=2")


def nested_constraints() -> None:
    plan({"data_parallel": {"size": 2}})


def fsdp_constraint() -> None:
    plan({"fsdp": 2})


def bf16_constraint() -> None:
    plan({"bf16": True})


def text_for_size() -> None:
    plan({DP: "2"})


def text_for_world_size() -> None:
    plan(world_size="2")


def unknown_optimizer_name() -> None:
    plan(optimizer="Adan")


def sizes_that_do_not_divide() -> None:
    plan({DP: 3})


# Models that something else has changed


def compiled() -> None:
    parallel(PLAN, torch.compile(Net(), backend="eager"))


def data_parallel_module() -> None:
    parallel(PLAN, nn.DataParallel(Net()))


def scripted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        module = torch.jit.script(nn.Linear(8, 8))  # pyright: ignore[reportPrivateImportUsage]: public
    parallel(PLAN, module)


def plan_of_scripted_block() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it deprecated
        scripted = torch.jit.script(nn.Linear(8, 8))  # pyright: ignore[reportPrivateImportUsage]: public
    vescale.generate_plan(nn.Sequential(scripted, nn.Linear(8, 8)), {}, world_size=2)


def plan_of_compiled() -> None:
    vescale.generate_plan(torch.compile(Net()), {}, world_size=2)  # pyright: ignore[reportArgumentType]: a module


def on_meta() -> None:
    parallel(PLAN, Net().to("meta"))


def parallelized_twice() -> None:
    parallel(PLAN, parallel())


def sharded_by_torch() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    parallel(make_plan({DP: 2}), model)


# Optimizers, schedulers, data


def optimizer_object() -> None:
    model = Net()
    parallel(PLAN, model, AdamW(model.parameters()))


def optimizer_of_parameters() -> None:
    make: Any = AdamW
    parallel(PLAN, Net(), lambda params: make(params, lr=0.1))


def optimizers_by_name() -> None:
    parallel(PLAN, Net(), lambda model: {"all": sgd(model)})


def scheduler_object() -> None:
    parallel(PLAN, Net(), sgd, StepLR(sgd(Net()), 1))


def scheduler_without_arguments() -> None:
    parallel(PLAN, Net(), sgd, StepLR)


def scheduler_that_returns_nothing() -> None:
    parallel(PLAN, Net(), sgd, lambda optimizer: None)


def data_set_as_optimizer() -> None:
    parallel(PLAN, Net(), Rows())


def optimizer_of_before() -> None:
    model = Net()
    optimizer = AdamW(model.parameters())
    parallel(PLAN, model)
    optimizer.step()


def closure() -> None:
    _, optimizer = parallel(PLAN, Net(), sgd)
    optimizer.step(lambda: 0.0)


# Calls


def lists_for_tensors() -> None:
    parallel()([[1.0] * 8], [[1.0] * 8])


def array_for_tensor() -> None:
    parallel()(torch.ones(2, 8).numpy())


def unknown_name_in_batch() -> None:
    parallel()({"x": torch.ones(2, 8), "target": torch.ones(2, 8)})


# Checkpoints


def save_a_model(path: Path) -> None:
    vescale.save(path, anything(parallel()))


def load_a_model(path: Path) -> None:
    vescale.load(path, anything(parallel()))


def load_into_a_list(path: Path) -> None:
    vescale.load(path, anything([parallel()]))


def save_swapped(path: Path) -> None:
    vescale.save(anything({"model": parallel()}), anything(path))


def save_in_the_background(path: Path) -> None:
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(path, anything(parallel()))


def load_before_any_save(path: Path) -> None:
    vescale.load(path / "nothing", {"model": parallel()})


def load_the_directory_of_all(path: Path) -> None:
    model = parallel()
    vescale.save(path / "step-1", {"model": model})
    vescale.load(path, {"model": model})


def load_a_file(path: Path) -> None:
    torch.save(Net().state_dict(), path / "model.pt")
    vescale.load(path / "model.pt", {"model": parallel()})


# On two ranks


def start(constraints: Constraints, model: nn.Module | None = None) -> Any:
    torch.manual_seed(0)
    return vescale.parallelize(make_plan(constraints), model or Net())


def plan_for_more_ranks() -> None:
    start({DP: 4})


def global_batch_that_does_not_divide() -> None:
    start({DP: 2, "batch.global_size": 7})


def plans_that_differ() -> None:
    start({DP: 2, ZERO: 3 * dist.get_rank()})


def models_that_differ() -> None:
    start({DP: 2}, Net(8 + 8 * dist.get_rank()))


def optimizer_on_one_rank() -> None:
    torch.manual_seed(0)
    vescale.parallelize(make_plan({DP: 2}), Net(), sgd if dist.get_rank() else None)


def deferred_on_one_rank() -> None:
    torch.manual_seed(0)
    start({DP: 2}, vescale.deferred_init(Net) if dist.get_rank() else Net())


def too_few_rows() -> None:
    start({PP: 2, PARTS: 4})({"x": torch.ones(3, 8), "labels": torch.zeros(3, 8)})


class Repeats(Net):
    """Runs a block once more on one rank."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            for _ in range(2 if index == 1 and dist.get_rank() == 1 and _repeats else 1):
                x = block(x)
        return x.mean()


_repeats = False


def block_repeated_on_one_rank() -> None:
    global _repeats
    model = start({DP: 2, ZERO: 3}, Repeats())
    try:
        for _repeats in (False, True):
            model(torch.full((4, 8), float(dist.get_rank()))).backward()
    finally:
        _repeats = False


# What is taken, and how it is meant


def batch_of(kind: str) -> Any:
    batch = {"x": torch.arange(64.0).view(8, 8) / 64, "labels": torch.zeros(8, 8)}
    return UserDict(batch) if kind == "user_dict" else batch


def losses(constraints: Constraints, kind: str, name: str) -> tuple[float, float]:
    """Return the loss of a dict given as one argument, and that of one device."""
    model: Any = {"by_name": Net, "whole": TakesBatch}[name]
    torch.manual_seed(0)
    plain = model()
    batch = {**batch_of(kind)}
    expected = plain(**batch) if name == "by_name" else plain(batch)
    given = batch_of(kind)
    if constraints.get(DP, 1) > 1:
        part = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
        given = {key: value[part] for key, value in given.items()}
    torch.manual_seed(0)
    loss = vescale.parallelize(make_plan(constraints), model())(given)
    return loss.item(), expected.item()


def optimizer_class() -> tuple[str, float]:
    from functools import partial

    _, optimizer = parallel(PLAN, Net(), partial(AdamW, lr=0.5))
    return type(parallel(PLAN, Net(), AdamW)[1]).__name__, optimizer.param_groups[0]["lr"]


def dtypes_of_plans() -> list[str | None]:
    given: list[Any] = ["bf16", torch.bfloat16, "bfloat16"]
    planned = [plan({"precision.param": dtype}).precision.param for dtype in given]
    return planned + [
        with_constraints(PLAN, {"precision.reduce": dtype}).precision.reduce for dtype in given
    ]


def either_order() -> bool:
    constraints = {DP: 2, ZERO: 1}
    swapped = vescale.generate_plan(anything(constraints), anything(Net()), world_size=2)
    return swapped == plan(constraints) and swapped.data_parallel == DataParallel(
        size=2, zero_stage=1
    )
