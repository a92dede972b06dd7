"""A table of first mistakes: each message says what was expected, what came, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vescale_testing import World

from . import mistakes as m
from .plans import DP, PARTS, PP, TP, ZERO, Constraints
from .test_bad_input import attempt


@dataclass(frozen=True)
class Row:
    """What a person did, and texts that the message contains: expected, came, what to do."""

    did: Callable[..., Any]
    texts: tuple[str, ...]
    ranks: int = 1


def row(did: Callable[..., Any], *texts: str, ranks: int = 1) -> Row:
    return Row(did, texts, ranks)


ORDER = "parallelize(plan, model, optimizer_fn, lr_scheduler_fn, dataset)"
TABLE = [
    row(m.class_to_parallelize, "expected model to be an nn.Module", "the class Net", "Net(...)"),
    row(m.class_to_generate_plan, "to be an nn.Module", "the class Net", "deferred_init(Net"),
    row(m.swapped_arguments, "expected plan to be a ParallelPlan", "got Net", ORDER),
    row(m.constraints_for_plan, "to be a ParallelPlan", "got dict", "generate_plan(model, con"),
    row(m.text_for_plan, "to be a ParallelPlan", "got str", "ParallelPlan.from_json(text)"),
    row(m.list_of_models, "to be an nn.Module", "got list", "parallelize one module"),
    row(m.state_dict_for_model, "to be an nn.Module", "got OrderedDict", "load_state_dict"),
    row(m.path_for_json, "expected a plan as JSON", "'plans/plan.json'", "read_text()"),
    row(m.number_for_section, "to be a DataParallel", "got 2", "DataParallel(size=..)"),
    row(m.constraints_as_text, "expected constraints as a dict", "got str", "{'data_parallel.s"),
    row(m.nested_constraints, "unknown constraint 'data_parallel'", "'data_parallel.size': .."),
    row(m.fsdp_constraint, "'fsdp'", "'data_parallel.size': 2, 'data_parallel.zero_stage': 3"),
    row(m.bf16_constraint, "unknown constraint 'bf16'", "'precision.param': 'bfloat16'"),
    row(m.text_for_size, "expected data_parallel.size to be a positive integer", "got '2'"),
    row(m.text_for_world_size, "expected world_size to be a positive integer", "got '2'"),
    row(m.unknown_optimizer_name, "expected optimizer to be one of", "'Adan'", "name the one"),
    row(m.sizes_that_do_not_divide, "data_parallel.size", "3", "2"),
    row(m.compiled, "OptimizedModule", "torch.compile(vescale.parallelize(plan, model))"),
    row(m.data_parallel_module, "DataParallel", "give parallelize the plain module (.module)"),
    row(m.scripted, "ScriptModule", "the module that it was scripted from"),
    row(m.plan_of_scripted_block, "'0' is a ScriptModule", "the module that it was scripted from"),
    row(m.plan_of_compiled, "OptimizedModule", "torch.compile(vescale.parallelize(plan, model))"),
    row(m.on_meta, "'embed.weight' is on the meta device", "vescale.deferred_init(Net"),
    row(m.parallelized_twice, "Net is parallelized already", "the plain module"),
    row(m.sharded_by_torch, "is a FSDPModule", "fully_shard", "the plain module", ranks=2),
    row(m.optimizer_object, "expected optimizer_fn to be a function", "got AdamW", "lambda model"),
    row(m.optimizer_of_parameters, "called with the model alone", "not iterable", "lambda model"),
    row(m.optimizers_by_name, "to return a torch optimizer", "got dict", "a list of them"),
    row(m.scheduler_object, "lr_scheduler_fn to be a function", "got StepLR", "lambda optimizer"),
    row(m.scheduler_without_arguments, "with the optimizer alone", "step_size", "lambda optimiz"),
    row(m.scheduler_that_returns_nothing, "to return a scheduler", "got NoneType", "lambda"),
    row(m.data_set_as_optimizer, "optimizer_fn to be a function", "got Rows", "dataset=.."),
    row(m.optimizer_of_before, "AdamW holds", "parallelize has replaced", "optimizer_fn"),
    row(m.closure, "step(closure) is not supported", "call the model and backward() first"),
    row(m.lists_for_tensors, "expected tensors", "a list of numbers for 'x'", "torch.as_tensor"),
    row(m.array_for_tensor, "expected tensors", "a ndarray for 'x'", "torch.as_tensor"),
    row(m.unknown_name_in_batch, "what forward takes (x, labels)", "'target'", "leave it out"),
    row(m.save_a_model, "expected state to be a dict", "got Net", "save(path, {'model': model})"),
    row(m.load_a_model, "expected state to be a dict", "got Net", "load(path, {'model': model})"),
    row(m.load_into_a_list, "expected state to be a dict", "got list", "load(path, {'model': m"),
    row(m.save_swapped, "expected path to be a path", "got dict", "save(path, {'model': model})"),
    row(m.save_in_the_background, "expected state to be a dict", "got Net", "save(path, {'model"),
    row(m.load_before_any_save, "no such directory", "first run", "vescale_ckpt.latest(directory"),
    row(m.load_the_directory_of_all, "vescale.json", "missing", "vescale_ckpt.latest(directory)"),
    row(m.load_a_file, "expected a directory", "got a file"),
    row(m.plan_for_more_ranks, "expected 4 ranks", "world size 2", "torchrun --nproc-per-node 4",
        ranks=2),
    row(m.global_batch_that_does_not_divide, "a multiple of", "got 7", "the nearest sizes are 6",
        ranks=2),
    row(m.plans_that_differ, "the same plan on every rank",
        "data_parallel.zero_stage is 0 on rank 0 and 3 on rank 1", "the same script", ranks=2),
    row(m.models_that_differ, "the same model on every rank",
        "parameter 'embed.weight' is (8, 8) float32 on rank 0 and (16, 8) float32 on rank 1",
        "the same script", ranks=2),
    row(m.optimizer_on_one_rank, "the same arguments on every rank",
        "optimizer_fn is None on rank 0 and given on rank 1", "the same script", ranks=2),
    row(m.deferred_on_one_rank, "the same arguments on every rank",
        "model is one with values on rank 0 and deferred on rank 1", ranks=2),
    row(m.block_repeated_on_one_rank, "ranks ran different blocks", "every rank runs the same",
        "Use data_parallel.zero_stage 1", ranks=2),
    row(m.too_few_rows, "at least 4 rows, one for each micro-batch", "got 3 rows", ranks=2),
]  # fmt: skip
WITH_A_PATH = {
    m.save_a_model, m.load_a_model, m.load_into_a_list, m.save_swapped, m.save_in_the_background,
    m.load_before_any_save, m.load_the_directory_of_all, m.load_a_file,
}  # fmt: skip


LEAVES_A_COLLECTIVE = {m.block_repeated_on_one_rank}


@pytest.mark.by_day("array_for_tensor")
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.did.__name__)
def test_a_mistake_is_told_with_what_to_do(
    request: pytest.FixtureRequest, tmp_path: Path, row: Row
) -> None:
    world: World = request.getfixturevalue(f"world{row.ranks}")
    args = (tmp_path,) if row.did in WITH_A_PATH else ()
    answers = world.run(attempt, row.did, *args, timeout=60.0)
    if row.did in LEAVES_A_COLLECTIVE:
        world.close()  # its process group is of no more use
    for answer in answers:
        assert answer is not None, "nothing was raised"
        kind, message = answer
        assert kind not in (AttributeError, KeyError, IndexError, AssertionError), answer
        assert "gloo" not in message
        for text in row.texts:
            assert text in message, message


PLANS: dict[str, Constraints] = {
    "one": {},
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "pp": {PP: 2, PARTS: 2},
}


@pytest.mark.by_day("dp-by_name")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["by_name", "whole"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_dict_is_one_argument_or_several_as_forward_takes_it(
    request: pytest.FixtureRequest, plan: str, name: str
) -> None:
    world: World = request.getfixturevalue("world1" if plan == "one" else "world2")
    for kind in ("dict", "user_dict"):
        for loss, expected in world.run(m.losses, PLANS[plan], kind, name):
            # Rounding of float32: ranks sum in another order.
            assert loss == pytest.approx(expected, rel=1e-6)


def test_an_optimizer_may_be_given_by_its_class(world1: World) -> None:
    assert world1.run(m.optimizer_class) == [("AdamW", 0.5)]


def test_a_dtype_may_be_torchs_or_short() -> None:
    assert m.dtypes_of_plans() == ["bfloat16"] * 6


def test_constraints_may_come_before_the_model() -> None:
    assert m.either_order()


ALONE = """
import torch, vescale
model = torch.nn.Linear(2, 2)
vescale.parallelize(vescale.generate_plan(model, world_size=2), model)
"""
LAUNCHERS: dict[str, tuple[dict[str, str], str]] = {
    "none": ({}, "not started by torchrun; start as many ranks: torchrun --nproc-per-node 2 "),
    "srun": ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, "got that of srun (SLURM_PROCID"),
}


@pytest.mark.by_day("none")
@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_that_torchrun_did_not_start_says_how_to(tmp_path: Path, launcher: str) -> None:
    variables, message = LAUNCHERS[launcher]
    script = tmp_path / "mine.py"
    script.write_text(ALONE, encoding="utf-8")
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**clean, **variables}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode != 0
    assert message in ended.stderr
    assert launcher != "none" or "torchrun --nproc-per-node 2 mine.py" in ended.stderr
