"""Blocks that are compiled with the collectives of tensor parallelism in their midst."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import vescale
from vescale_parallel import CompiledBlock, ParallelPlan, compile_report, with_constraints
from vescale_testing import World

from .families import make
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .training import whole

# What all of torch.compile does but make machine code; the arithmetic is that of eager operators.
QUICK = "aot_eager"
CPU_COMPILER = "inductor"
RECOMPUTE = "recompute"
ROWS = 4


PLANS: dict[str, Constraints] = {
    "tp": {TP: 2},
    "tp-sequence": {TP: 2, SEQUENCE: True},
    "tp-recompute": {TP: 2, SEQUENCE: True, RECOMPUTE: "full"},
    "tp-dp": {TP: 2, DP: 2},
    "tp-zero3": {TP: 2, DP: 2, ZERO: 3},
    "tp-sequence-zero3-recompute": {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3, RECOMPUTE: "full"},
    "pp-tp": {PP: 2, PARTS: 2, TP: 2},
    "pp-tp-sequence": {PP: 2, PARTS: 2, TP: 2, SEQUENCE: True},
}


# --- The numbers of the plan whose blocks are not compiled.


def model_and_batch(family: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    if family == "dealt_heads":  # six queries read three keys; two ranks take three queries each
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {
            "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64,
            "num_attention_heads": 6, "num_key_value_heads": 3,
        }  # fmt: skip
        _, batch = make("llama")
        return LlamaForCausalLM(LlamaConfig(**sizes)).double(), batch
    model, batch = make(family)
    return model.double(), batch


def rows_of(batch: Mapping[str, Any], constraints: Constraints) -> dict[str, Any]:
    """Return the rows of this rank; tensor-parallel ranks, which are innermost, have the same."""
    parts = constraints.get(DP, 1)
    part = dist.get_rank() // constraints.get(TP, 1) % parts
    return {
        name: value.chunk(parts)[part]
        if isinstance(value, Tensor)
        else rows_of(value, constraints)
        for name, value in batch.items()
    }


def plan_of(model: nn.Module, batch: dict[str, Any], constraints: Constraints) -> ParallelPlan:
    """Return a plan whose sharding plan is proven on the batch."""
    given = {RECOMPUTE: "none", ZERO: 0, **constraints}
    rows = rows_of(batch, constraints)
    return vescale.generate_plan(model, given, cluster="cpu", example_batch=rows)


def compiled_as_written(
    family: str, constraints: Constraints, backend: str, length: int | None
) -> list[dict[str, Tensor]]:
    """Return losses and gradients of two steps, of eager and of compiled blocks."""
    found: list[dict[str, Tensor]] = []
    for more in ({}, {"compile": "blocks", "compile_backend": backend}):
        model, batch = model_and_batch(family)
        if length is not None:
            batch = {name: tensor[:, :length] for name, tensor in batch.items()}
        plan = with_constraints(plan_of(model, batch, constraints), more)
        model = vescale.parallelize(plan, model.train())
        values: dict[str, Tensor] = {}
        for step in range(2):
            output: Any = model(**rows_of(batch, constraints))
            loss = output if isinstance(output, Tensor) else output.loss
            loss.backward()
            values[f"loss {step}"] = loss.detach()
        values |= {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        model.eval()
        with torch.no_grad():
            model(**rows_of(batch, constraints))  # as it is written, on stages: they look at it
            output = model(**rows_of(batch, constraints))
        values["evaluated"] = output if isinstance(output, Tensor) else output.loss
        found.append(values)
        if more:
            assert_graphs(compile_report(model), constraints)
    return found


def assert_graphs(report: Mapping[str, CompiledBlock], constraints: Constraints) -> None:
    """One for training, one for evaluation: nothing ends a graph.

    Stages have no more of blocks than they have. Behind the first one there is one more with a cut
    sequence, for a step's first micro-batch, of which they do not know how long it was.
    """
    has_stages = PP in constraints
    nums = (2, 3) if has_stages and SEQUENCE in constraints else (2,)
    seen = [block for block in report.values() if block.num_graphs or not has_stages]
    assert seen
    for block in seen:
        assert block.num_graphs in nums, report
        assert (block.breaks, block.eager) == ((), ""), report


def same_bits(world: World, family: str, plan: str, *, length: int | None = None) -> None:
    ran = world.run(compiled_as_written, family, PLANS[plan], QUICK, length, timeout=500)
    for written, compiled in ran:
        assert written.keys() == compiled.keys()
        for name, expected in written.items():
            assert torch.equal(compiled[name], expected), name


@pytest.mark.by_day("gpt2-tp-sequence")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        *(("gpt2", "tp"), ("gpt2", "tp-sequence"), ("llama", "tp"), ("llama", "tp-sequence")),
        *(("llama", "tp-recompute"), ("nanogpt", "tp"), ("nanogpt", "tp-sequence")),
        *(("dealt_heads", "tp"), ("dealt_heads", "tp-sequence"), ("qwen3", "tp-sequence")),
        *(("one_key_value_head", "tp"), ("bert", "tp"), ("t5", "tp"), ("encoding", "tp")),
    ],
)
def test_a_compiled_block_has_one_graph_and_the_bits_of_the_block_as_it_is_written(
    world2: World, family: str, plan: str
) -> None:
    same_bits(world2, family, plan)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_sequences_that_do_not_divide_compile(world2: World, family: str) -> None:
    same_bits(world2, family, "tp-sequence", length=11)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "plan", ["tp-dp", "tp-zero3", "tp-sequence-zero3-recompute", "pp-tp", "pp-tp-sequence"]
)
def test_collectives_of_blocks_compile_with_other_parallelism(
    world4: World, family: str, plan: str
) -> None:
    same_bits(world4, family, plan)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", ["tp", "tp-sequence"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_machine_code_computes_what_blocks_do_as_they_are_written(
    world2: World, family: str, plan: str
) -> None:
    # Machine code fuses what eager operators round in between; Llama's norms and the loss that
    # transformers returns compute in float32.
    relative = 1e-6 if family == "llama" else 1e-12
    ran = world2.run(compiled_as_written, family, PLANS[plan], CPU_COMPILER, None, timeout=500)
    for written, compiled in ran:
        for name, expected in written.items():
            atol = relative * float(expected.abs().max())
            rtol = 1e-6 if expected.dim() == 0 else 0
            torch.testing.assert_close(compiled[name], expected, rtol=rtol, atol=atol, msg=name)


# --- What is compiled, and how often.


class Block(nn.Module):
    """Two layers read one activation; the sum over ranks has a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(width), nn.Linear(2 * width, width)
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)

    def forward(self, x_BSF: Tensor) -> Tensor:
        normed = self.norm(x_BSF)
        return x_BSF + self.down(self.up(normed) * self.gate(normed).sigmoid())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(2)])
        self.head = nn.Linear(8, 16)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSF = self.embed(ids_BS)
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return nn.functional.cross_entropy(self.head(x_BSF).flatten(0, 1), ids_BS.flatten())


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def ids(length: int) -> Tensor:
    return torch.arange(4 * length).view(4, length) * 7 % 16


def compiled(plan: str) -> nn.Module:
    model = net()
    constraints = {**PLANS[plan], "compile": "blocks", "compile_backend": QUICK}
    made = vescale.generate_plan(model, constraints, example_batch=ids(6))
    return vescale.parallelize(made, model)


def lengths() -> None:
    model = compiled("tp-sequence")
    counts: list[int] = []
    for length in (6, 8, 10, 14, 8):
        loss = model(ids(length))
        loss.backward()
        assert loss.item() == pytest.approx(net()(ids(length)).item(), rel=1e-12)
        counts.append(sum(block.num_graphs for block in compile_report(model).values()))
    assert counts == [2, 4, 4, 4, 4]
    # The graph of a model that is gone still knows its ranks.
    loss = model(ids(6))
    del model
    gc.collect()
    loss.backward()


def orders_of_hooks() -> list[tuple[list[int], list[int]]]:
    modules = compiled("tp-sequence").modules()
    return [
        ([*hooks], [*dict.keys(hooks)])
        for module in modules
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    ]


@pytest.mark.slow
def test_hooks_lie_in_the_order_in_which_they_run(world2: World) -> None:
    # Dynamo of torch 2.11 looks for them by the order of the dict.
    for orders in world2.run(orders_of_hooks):
        assert any(len(run) > 1 for run, _ in orders)
        for run, lie in orders:
            assert run == lie


@pytest.mark.slow
def test_a_third_length_does_not_compile_collectives_again(world2: World) -> None:
    world2.run(lengths)
