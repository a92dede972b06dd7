"""Blocks that a plan compiles: the numbers of one device whose blocks are compiled."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import CompiledBlock, ParallelPlan, compile_report
from vescale_testing import World

from .families import ROWS as FAMILY_ROWS, make
from .plans import COPIES, DP, PARTS, PP, SCHEDULE, VIRTUAL, ZERO, Constraints, make_plan
from .test_bad_input import check as refused
from .training import Recipe, Record, compile_in_place, train, whole

# What all of torch.compile does but make machine code, in a tenth of the time.
QUICK = "aot_eager"
CPU_COMPILER = "inductor"
RECOMPUTE = "recompute"
ACCUMULATE = "batch.gradient_accumulation"


# --- The numbers of one device.


def same(
    world: World,
    recipe: Recipe,
    constraints: Constraints,
    *,
    relative: float,
    run: Callable[[Recipe, Constraints], Record] = train,
) -> None:
    expected = train(replace(recipe, deferred=False))
    for record in world.run(run, recipe, constraints):
        assert record.losses == pytest.approx(expected.losses, rel=relative)
        assert record.norms == pytest.approx(expected.norms, rel=relative)
        assert record.evaluations == pytest.approx(expected.evaluations, rel=relative)
        assert [*record.parameters] == [*expected.parameters]
        for name, parameter in record.parameters.items():
            scale = float(expected.parameters[name].abs().max())
            torch.testing.assert_close(
                parameter, expected.parameters[name], rtol=0, atol=relative * scale, msg=name
            )


HAND_WRITTEN = Recipe(
    model="hand_written", compiled=QUICK, evaluate=True, steps=2, optimizer="momentum"
)
PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero1": {DP: 2, ZERO: 1},
    "zero2": {DP: 2, ZERO: 2},
    "zero3": {DP: 2, ZERO: 3},
    "zero3-recompute": {DP: 2, ZERO: 3, RECOMPUTE: "full"},
    "zero3-accumulation": {DP: 2, ZERO: 3, ACCUMULATE: 2},
    "pp": {PP: 2, PARTS: 2},
    "pp-recompute": {PP: 2, PARTS: 2, RECOMPUTE: "full"},
    "pp-interleaved": {PP: 2, PARTS: 2, SCHEDULE: "interleaved_1f1b", VIRTUAL: 2},
}


@pytest.mark.by_day("pp")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_compiled_blocks_give_the_numbers_of_one_device(world2: World, plan: str) -> None:
    same(world2, HAND_WRITTEN, PLANS[plan], relative=1e-12)


def train_with_whole_passes(recipe: Recipe, constraints: Constraints) -> Record:
    """Train where backward of a compiled block, which is one function, cannot be split."""
    with pytest.warns(UserWarning, match="weights enter CompiledFunctionBackward"):
        return train(recipe, constraints)


@pytest.mark.nightly
def test_backward_passes_of_compiled_blocks_are_not_split(world2: World) -> None:
    zbv = {PP: 2, PARTS: 4, SCHEDULE: "zbv", VIRTUAL: 2}
    same(world2, HAND_WRITTEN, zbv, relative=1e-12, run=train_with_whole_passes)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", ["zero3", "pp"])
@pytest.mark.parametrize("model", ["gpt2", "llama", "gemma"])
def test_models_of_transformers_compile_under_plans(world2: World, model: str, plan: str) -> None:
    # Norms of Llama and Gemma compute in float32 whatever the model's dtype.
    relative = 1e-6 if model != "gpt2" else 1e-11
    same(world2, replace(HAND_WRITTEN, model=model), PLANS[plan], relative=relative)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", ["zero3", "dp", "pp"])
def test_machine_code_gives_the_numbers_of_one_device(world2: World, plan: str) -> None:
    recipe = replace(HAND_WRITTEN, compiled=CPU_COMPILER, evaluate=plan != "zero3")
    same(world2, recipe, PLANS[plan], relative=1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("plan", ["zero3-recompute", "pp"])
def test_machine_code_of_transformers_gives_the_numbers_of_one_device(
    world2: World, model: str, plan: str
) -> None:
    recipe = replace(HAND_WRITTEN, model=model, compiled=CPU_COMPILER)
    # Llama's norms compute in float32 whatever the model's dtype.
    same(world2, recipe, PLANS[plan], relative=1e-10 if model == "gpt2" else 1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", [{DP: 2, ZERO: 3}, {PP: 2, PARTS: 2}], ids=["zero3", "pp"])
def test_a_deferred_model_compiles(world2: World, plan: Constraints) -> None:
    same(world2, replace(HAND_WRITTEN, deferred=True), plan, relative=1e-12)


@pytest.mark.nightly
def test_four_ranks_compile_a_pipeline_of_shards_and_copies_of_shards(world4: World) -> None:
    same(world4, HAND_WRITTEN, {PP: 2, PARTS: 2, DP: 2, ZERO: 3}, relative=1e-12)
    same(world4, HAND_WRITTEN, {DP: 4, ZERO: 3, COPIES: 2}, relative=1e-12)


# --- Other models.


def trained(model: nn.Module, batch: Any, constraints: Constraints) -> dict[str, Tensor]:
    """Return the loss and all gradients of one step under a plan, on this rank's rows."""
    model = vescale.parallelize(make_plan(constraints), model.train())
    ranks = constraints.get(DP, 1)
    rows = {n: x.chunk(ranks)[torch.distributed.get_rank() % ranks] for n, x in batch.items()}
    torch.manual_seed(1)
    loss = model(**rows).loss
    loss.backward()
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def of_family(family: str, constraints: Constraints, backend: str) -> None:
    """Compare a compiled family with itself as it is written, by the largest of each tensor.

    Whatever a model's dtype, norms of Qwen3 and T5 compute in float32, where inductor rounds
    otherwise than torch: torch.compile alone, on one device, is 2e-7 off there.
    """
    # Torch's grouped products, which Mixtral's experts are, have no float64.
    dtype = torch.float32 if family == "mixtral" else torch.float64
    relative = 1e-10
    if family == "mixtral":
        relative = 1e-5
    elif backend == CPU_COMPILER and family in ("qwen3", "t5"):
        relative = 1e-6
    compiled = {"compile": "blocks", "compile_backend": backend}
    found: list[dict[str, Tensor]] = []
    for more in ({}, compiled):
        torch.manual_seed(0)
        model, batch = make(family)
        assert FAMILY_ROWS % constraints.get(DP, 1) == 0
        found.append(trained(model.to(dtype), batch, {**constraints, **more}))
    written, compiled_too = found
    assert written.keys() == compiled_too.keys()
    for name, expected in written.items():
        # Transformers computes the loss in float32.
        atol = relative * max(float(expected.abs().max()), 1e-3)
        torch.testing.assert_close(compiled_too[name], expected, rtol=1e-6, atol=atol, msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("backend", [QUICK, CPU_COMPILER])
@pytest.mark.parametrize("family", ["bert", "mixtral", "qwen3", "t5"])
def test_a_compiled_family_computes_what_it_does_as_it_is_written(
    world2: World, family: str, backend: str
) -> None:
    world2.run(of_family, family, {DP: 2, ZERO: 3}, backend, timeout=400)


# --- What is compiled, and how often.


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.drop, self.down = nn.Dropout(dropout), nn.Linear(2 * width, width)

    def forward(self, x_BSF: Tensor) -> Tensor:
        return x_BSF + self.down(self.drop(F.gelu(self.up(self.norm(x_BSF)))))


class Prints(Block):
    """Breaks the graph in the middle."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        hidden = self.up(self.norm(x_BSF))
        torch._dynamo.graph_break()
        return x_BSF + self.down(F.gelu(hidden))


class Draws(Block):
    """Draws random numbers in its own code."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        return x_BSF + F.dropout(self.down(self.up(x_BSF)), 0.5, self.training)


class Net(nn.Module):
    def __init__(self, kind: type[Block] = Block, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([kind(8, dropout) for _ in range(depth)])
        self.head = nn.Linear(8, 16)
        self.head.weight = self.embed.weight

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSF = self.embed(ids_BS)
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return F.cross_entropy(self.head(x_BSF).flatten(0, 1), ids_BS.flatten())


class Scaled(Block):
    """Has a float that the loop changes: a coefficient that is warmed up, say."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__(width, dropout)
        self.scale = 1.0

    def forward(self, x_BSF: Tensor) -> Tensor:
        scale = self.scale * 2
        return super().forward(x_BSF) * (scale if scale > 0.5 else 1.0)


PLAN = {DP: 2, ZERO: 3, "compile": "blocks", "compile_backend": QUICK}


def net(kind: type[Block] = Block, *, dropout: float = 0.0, depth: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind, depth, dropout).double()


def ids(length: int = 6) -> Tensor:
    return torch.arange(4 * length).view(4, length) * 7 % 16


def scaled_in_turns() -> None:
    """Change a float of the blocks as a warm-up does: torch compiles it as one that changes."""
    model = vescale.parallelize(make_plan(PLAN), net(Scaled))
    for scale in (1.0, 1.5, 2.5, 0.1, 3.5):
        for module in model.modules():
            if isinstance(module, Scaled):
                module.scale = scale
        one = net(Scaled)
        for module in one.modules():
            if isinstance(module, Scaled):
                module.scale = scale
        loss = model(part(ids()))
        torch.testing.assert_close(loss, one(ids()), rtol=1e-12, atol=0)
        loss.backward()
    assert not any(block.eager for block in compile_report(model).values())


@pytest.mark.nightly
def test_blocks_whose_floats_change_stay_compiled(world2: World) -> None:
    world2.run(scaled_in_turns)


def part(batch: Tensor) -> Tensor:
    return batch.chunk(2)[torch.distributed.get_rank()]


def steps(model: nn.Module, lengths: tuple[int, ...]) -> list[int]:
    """Train on batches of these lengths; return how many graphs there were after each."""
    counts: list[int] = []
    for length in lengths:
        model(part(ids(length))).backward()
        counts.append(sum(block.num_graphs for block in compile_report(model).values()))
    return counts


def lengths() -> None:
    # The compiler of torch 2.11 remembers the lengths that blocks of earlier tests had.
    torch.compiler.reset()
    model = vescale.parallelize(make_plan(PLAN), net())
    assert steps(model, (6, 6, 8, 10, 13, 7)) == [2, 2, 4, 4, 4, 4]
    model.eval()
    with torch.no_grad():
        model(part(ids(6)))
    count = sum(block.num_graphs for block in compile_report(model).values())
    with torch.no_grad():
        model(part(ids(9)))
    assert sum(block.num_graphs for block in compile_report(model).values()) <= count + 2
    # As on one device, where nothing is called otherwise after that.
    assert all(not block.eager and not block.breaks for block in compile_report(model).values())


@pytest.mark.slow
def test_a_third_length_does_not_compile_again(world2: World) -> None:
    world2.run(lengths)


def loss_with_dropout(kind: type[Block], compiled: bool) -> tuple[float, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = PLAN if compiled else {DP: 2, ZERO: 3}
        model = vescale.parallelize(make_plan(plan), net(kind, dropout=0.5))
        torch.manual_seed(1)
        losses = [model(part(ids())).item() for _ in range(3)]
    return sum(losses), [str(each.message) for each in caught if "compile" in str(each.message)]


def drawn_on_one_device(kind: type[Block]) -> float:
    model = net(kind, dropout=0.5)
    torch.manual_seed(1)
    return sum(model(ids()).item() for _ in range(3))


@pytest.mark.by_day("Draws")
@pytest.mark.slow
@pytest.mark.parametrize("kind", [Draws, Block])
def test_compiled_blocks_draw_what_one_device_draws(world2: World, kind: type[Block]) -> None:
    expected = drawn_on_one_device(kind)
    assert expected != net(kind)(ids()).item() * 3
    for loss, messages in world2.run(loss_with_dropout, kind, True):
        assert loss == pytest.approx(expected, rel=1e-12)
        said = "compile 'blocks': 'blocks.{}' runs as it is written in calls such as this one"
        assert [m.partition(",")[0] for m in messages] == [
            said.format(index) for index in range(2 * (kind is Draws))
        ]


def deep(dropout: float) -> list[int]:
    plan = {**PLAN, "compile_backend": "eager"}
    model = vescale.parallelize(make_plan(plan), net(dropout=dropout, depth=12))
    before = torch._dynamo.config.recompile_limit
    for _ in range(2):
        model(part(ids())).backward()
    assert torch._dynamo.config.recompile_limit == before
    report = compile_report(model)
    assert all(not block.eager and len(block.breaks) == 1 for block in report.values())
    return [block.num_graphs for block in report.values()]


@pytest.mark.nightly
def test_a_deep_model_that_draws_is_compiled_to_its_last_block(world2: World) -> None:
    # Before the dropout and behind it; torch gave up behind the eighth block.
    assert world2.run(deep, 0.5, timeout=400) == [[2] * 12] * 2


# --- What does not compile.


def breaks() -> dict[str, CompiledBlock]:
    model = vescale.parallelize(make_plan(PLAN), net(Prints))
    loss = model(part(ids()))
    plain = net(Prints)
    assert loss.item() == pytest.approx(plain(ids()).item(), rel=1e-12)
    return compile_report(model)


@pytest.mark.slow
def test_graph_breaks_are_listed_with_the_users_line(world2: World) -> None:
    for report in world2.run(breaks):
        for block in report.values():
            assert block.num_graphs == 2
            (where,) = block.breaks
            file, line, _ = where.split(":", 2)
            assert file == __file__
            assert "graph_break()" in linecache.getline(file, int(line))


def failing() -> None:
    """A compiler that fails for the second block; eager and compiled blocks mix."""
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        if len(graphs) == 2:
            raise RuntimeError("no such instruction\nand more")
        return graph.forward

    torch._dynamo.register_backend(backend, name="failing")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = vescale.parallelize(make_plan({**PLAN, "compile_backend": "failing"}), net())
        loss = model(part(ids()))
        loss.backward()
    plain = net()
    expected = plain(ids())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = ours.grad
        assert grad is not None
        torch.testing.assert_close(whole(grad), theirs.grad, rtol=1e-12, atol=1e-14, msg=name)
    said = [each for each in caught if "compile" in str(each.message)]
    message = "'blocks.1' is not compiled and runs as it is written, for this rank: no such"
    assert [str(each.message) for each in said] == [f"compile 'blocks': {message} instruction"]
    assert said[0].filename == __file__
    report = compile_report(model)
    assert [block.eager for block in report.values()] == ["", "no such instruction"]
    model(part(ids())).backward()
    assert len(graphs) == 2


@pytest.mark.slow
def test_a_block_that_does_not_compile_runs_as_it_is_written(world2: World) -> None:
    world2.run(failing)


def names() -> None:
    model = vescale.parallelize(make_plan(PLAN), net())
    model(part(ids())).backward()
    assert [*model.state_dict()] == [*net().state_dict()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in net().named_modules()]


@pytest.mark.nightly
def test_a_compiled_model_keeps_its_names(world2: World) -> None:
    world2.run(names)


def in_bfloat16() -> None:
    """Bits of compiled blocks on one device, where every rank has all rows of its own."""
    losses: list[Tensor] = []
    for plan in (None, {DP: 2, ZERO: 3, "compile": "blocks", "compile_backend": CPU_COMPILER}):
        model = net().bfloat16()
        if plan is None:
            compile_in_place(model, CPU_COMPILER)
            losses.append((model(ids()[:2]) + model(ids()[2:])).detach() / 2)
        else:
            losses.append(vescale.parallelize(make_plan(plan), model)(part(ids())).detach())
    # The mean of two, rounded to the 8 bits of bfloat16 once or twice.
    torch.testing.assert_close(losses[1], losses[0], rtol=2**-7, atol=0)


@pytest.mark.nightly
def test_bfloat16_compiles(world2: World) -> None:
    world2.run(in_bfloat16)


# --- What is refused.


def start(constraints: Constraints) -> None:
    vescale.parallelize(make_plan(constraints), net())


REFUSED: dict[str, tuple[Constraints, str]] = {
    "whole": ({DP: 2, "compile": "model"}, "expected compile to be 'none' or 'blocks', .*'model'"),
    "true": ({DP: 2, "compile": True}, "expected compile to be 'none' or 'blocks', got True"),
    "backend": ({**PLAN, "compile_backend": "gcc"}, "expected compile_backend .* got 'gcc'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compiled_is_refused(world2: World, case: str) -> None:
    constraints, message = REFUSED[case]
    refused(world2, ValueError, message, start, constraints)


def test_plans_of_before_blocks_are_read() -> None:
    assert ParallelPlan.from_json('{"compile": false}') == ParallelPlan()


def test_a_model_of_which_nothing_is_compiled_has_no_report() -> None:
    with pytest.raises(ValueError, match="of which nothing is compiled"):
        compile_report(nn.Linear(2, 2))
