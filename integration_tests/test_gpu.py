"""On GPUs plans train as one GPU does, and checkpoints hold what was there.

If there are fewer GPUs than ranks, ranks share them and talk over gloo, which cannot send from one
GPU to another: plans with pipelines need a GPU for each rank.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import vescale
import vescale_ckpt
from vescale_dtensor import DTensor, distribute_tensor
from vescale_testing import World

from . import test_dropout, test_one_device_equivalence, test_resume
from .models import batches
from .plans import PLANS, TWO, Constraints, make_plan
from .training import OPTIMIZERS, Recipe, make_model, samples, train

pytestmark = pytest.mark.gpu

MODELS = ("llama", "gpt2", "hand_written")
CASES = [
    (ranks, name, model) for ranks, plans in PLANS.items() for name in plans for model in MODELS
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_training_on_gpus_is_that_of_one_gpu(
    gpu_worlds: dict[int, World], case: tuple[int, str, str]
) -> None:
    ranks, plan, model = case
    if plan.startswith("pp") and torch.cuda.device_count() < ranks:
        # gloo, over which ranks talk that share a GPU, cannot send from one to another.
        pytest.skip("pipelines need a GPU for each rank")
    recipe = Recipe(model=model, device="cuda")
    test_one_device_equivalence.check(gpu_worlds[ranks], recipe, PLANS[ranks][plan])


def test_a_model_deferred_on_the_cpu_trains_on_a_gpu(gpu_worlds: dict[int, World]) -> None:
    recipe = Recipe(model="llama", device="cuda")
    expected = test_one_device_equivalence.on_one_device(recipe)
    for record in gpu_worlds[1].run(train, replace(recipe, deferred=True), {}):
        assert record.losses == expected.losses


DROPOUT = [
    *((2, plan, "hand_written") for plan in test_dropout.TWO),
    *((4, plan, "hand_written") for plan in test_dropout.FOUR),
    *((2, plan, name) for plan in ("tp", "zero3") for name in test_dropout.MODELS),
]


@pytest.mark.parametrize("case", DROPOUT, ids=lambda case: "-".join(map(str, case)))
def test_ranks_draw_what_one_gpu_draws(
    gpu_worlds: dict[int, World], case: tuple[int, str, str]
) -> None:
    ranks, plan, name = case
    test_dropout.check(gpu_worlds[ranks], name, test_dropout.PLANS[ranks][plan], "cuda")


def low_precision(constraints: Constraints, dtype: str) -> tuple[list[float], list[float]]:
    """Train with kernels that only half precision has: losses of the plan and of one GPU."""
    found: list[list[float]] = []
    for given in (constraints, None):
        model = make_model(Recipe(model="llama", dtype="float32", device="cuda"))
        model = model.to(getattr(torch, dtype))
        optimizer_fn, dataset = OPTIMIZERS["momentum"], samples(4)
        loader: Any = batches(4)
        if given is None:
            optimizer = optimizer_fn(model)
        else:
            plan = make_plan({**given, "batch.global_size": 8})
            model, optimizer, loader = vescale.parallelize(
                plan, model, optimizer_fn, None, dataset
            )
        losses: list[float] = []
        for batch in loader:
            loss = model({name: tensor.cuda() for name, tensor in batch.items()})
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    return found[0], found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("plan", [TWO["tp"], TWO["tp-sequence"], TWO["zero3"]])
def test_fused_kernels_of_half_precision_run_under_plans(
    gpu_worlds: dict[int, World], plan: Constraints, dtype: str
) -> None:
    for losses, expected in gpu_worlds[2].run(low_precision, plan, dtype):
        # bfloat16 rounds to 2^-8 = 0.4 %, float16 less: once per rank, in another order of sums.
        assert losses == pytest.approx(expected, rel=1e-2, abs=0)


def tensors(device: str) -> dict[str, Tensor]:
    """Return distributed and plain tensors, of sizes that do not divide."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    return {
        "rows": distribute_tensor(drawn(701, 300), mesh, (Shard(0),)),
        "columns": distribute_tensor(drawn(7, 3001, dtype=torch.bfloat16), mesh, (Shard(1),)),
        "copies": distribute_tensor(drawn(1025, 1031), mesh, (Replicate(),)),
        "transposed": distribute_tensor(drawn(500, 300).t().contiguous().t(), mesh, (Shard(1),)),
        "plain": drawn(33),
        "scalar": drawn().double(),
        "few": distribute_tensor(drawn(1), mesh, (Shard(0),)),
    }


def zeros(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def assert_equal(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        local, other = (
            t.to_local() if isinstance(t, DTensor) else t for t in (tensor, wanted[name])
        )
        assert torch.equal(local.cpu(), other.cpu()), name


def save_and_load(path: str, layout: Any, exchange: bool) -> None:
    on_gpu, on_cpu = tensors("cuda"), tensors("cpu")
    vescale_ckpt.save(f"{path}/sync", on_gpu, layout=layout)
    with vescale_ckpt.AsyncSaver() as saver:
        for step in range(2):
            saver.save(f"{path}/async-{step}", on_gpu, layout=layout)
    vescale_ckpt.save(f"{path}/of-cpu", on_cpu, layout=layout)
    for name in ("sync", "async-0", "async-1", "of-cpu"):
        for wanted in (on_gpu, on_cpu):
            state = zeros(wanted)
            vescale_ckpt.load(f"{path}/{name}", state, exchange=exchange)
            assert_equal(state, wanted)


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("layout", ["shared", "per_rank"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_checkpoints_of_gpus_and_of_cpus_are_each_others(
    gpu_worlds: dict[int, World], tmp_path: Path, ranks: int, layout: str, exchange: bool
) -> None:
    gpu_worlds[ranks].run(save_and_load, str(tmp_path), layout, exchange)


def overwrite_while_saving(path: str) -> bool:
    """Change a tensor on the GPU right after the call: what was there at the call is saved."""
    state = {"x": torch.ones(64 << 20, device="cuda")}
    with vescale_ckpt.AsyncSaver() as saver:
        saver.save(path, state)
        state["x"].mul_(3)
    vescale_ckpt.load(path, state)
    return bool((state["x"] == 1).all())


def test_an_async_save_holds_what_was_on_the_gpu_at_the_call(
    gpu_worlds: dict[int, World], tmp_path: Path
) -> None:
    assert gpu_worlds[1].run(overwrite_while_saving, str(tmp_path / "ckpt")) == [True]


@pytest.mark.parametrize(
    ("before", "after"),
    [("zero3", "tp"), ("tp-zero3", "dp"), ("nothing", "zero3-of-4"), ("hybrid2", "nothing")],
)
@pytest.mark.parametrize("name", ["hand_written", "gpt2"])
@pytest.mark.parametrize("deferred", [False, True])
def test_training_goes_on_under_another_plan(
    gpu_worlds: dict[int, World],
    tmp_path: Path,
    name: str,
    before: str,
    after: str,
    deferred: bool,
) -> None:
    path = tmp_path / "checkpoint"
    test_resume.check(gpu_worlds, path, name, before, after, deferred=deferred)
