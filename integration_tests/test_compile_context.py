"""Blocks on slices of sequences, compiled: the numbers of one device."""

from __future__ import annotations

import functools
import linecache
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import CompiledBlock
from vescale_testing import World

from .compiled_training import train_steps
from .contexts import FAMILIES, VOCABULARY, batch_of, build, rows_of
from .plans import CP, DP, EP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .test_bad_input import check as refused
from .training import whole

COMPILED: Constraints = {"compile": "blocks", "compile_backend": "aot_eager"}
METHOD = "context_parallel.method"
PLANS: dict[str, Constraints] = {
    "all_to_all": {CP: 2},
    "ring-zero3-recompute": {CP: 2, METHOD: "ring", ZERO: 3, "recompute": "full"},
}
AT_NIGHT: dict[str, Constraints] = {
    "dp": {CP: 2, DP: 2, ZERO: 3},
    "tp": {CP: 2, TP: 2},
    "pp": {CP: 2, PP: 2, PARTS: 2},
    "four": {CP: 4, METHOD: "ring"},
}
LENGTHS = (12, 12, 15, 9)
WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        rows, length, _ = x_BSF.shape
        heads = self.qkv(x_BSF).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        made = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(made.transpose(1, 2).reshape(x_BSF.shape))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF + self.attention(self.norm(x_BSF))
        return x_BSF + self.down(F.gelu(self.up(x_BSF)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BSF = self.embed(input_ids)
        for block in self.blocks:
            x_BSF = block(x_BSF)
        logits_BSV = self.head(x_BSF)[:, :-1]
        return F.cross_entropy(logits_BSV.flatten(0, 1), labels[:, 1:].flatten())


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return Net().double() if kind == "net" else build(kind)


def trained(
    kind: str, constraints: Constraints | None, lengths: tuple[int, ...]
) -> tuple[dict[str, Tensor], dict[str, CompiledBlock]]:
    """Return losses, the gradients of the first step and parameters; and what was compiled."""
    model = model_of(kind)
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
    batches = (rows_of(model, batch_of(step, n, "")) for step, n in enumerate(lengths))
    return train_steps(model, batches, is_compiled="compile" in (constraints or {}))


def check(
    world: World, kind: str, constraints: Constraints, lengths: tuple[int, ...] = LENGTHS
) -> list[dict[str, CompiledBlock]]:
    """Compare blocks that are compiled with one device; return what was compiled.

    Norms of transformers' families compute in float32, whatever the dtype: those are compared
    with the same plan whose blocks run as they are written, which is one device's.
    """
    if kind in FAMILIES:
        expected = world.run(trained, kind, constraints, lengths)[0][0]
    else:
        expected = trained(kind, None, lengths)[0]
    reports: list[dict[str, CompiledBlock]] = []
    for found, report in world.run(
        trained, kind, {**constraints, **COMPILED}, lengths, timeout=400
    ):
        assert found.keys() == expected.keys()
        for name, x in found.items():
            # To which compiled blocks are one device's (docs/howto/compile.md): compilers round
            # otherwise than operators do.
            atol = 1e-10 * float(expected[name].abs().max())
            torch.testing.assert_close(x, expected[name], rtol=0, atol=atol, msg=name)
        reports.append(report)
    return reports


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_blocks_on_slices_are_compiled(world2: World, plan: str) -> None:
    for report in check(world2, "net", PLANS[plan]):
        for block in report.values():
            assert block.num_graphs
            assert not block.eager
            (where,) = block.breaks
            file, line, why = where.split(":", 2)
            assert "self.attention(" in linecache.getline(file, int(line))
            assert "attention is to what other ranks have of the sequence" in why


@pytest.mark.nightly
@pytest.mark.slow
def test_a_sequence_that_is_too_short_to_be_shared_may_come_first(world2: World) -> None:
    check(world2, "net", {CP: 2}, (3, 12, 3, 9))


def trained_with_a_warning(plan: Constraints) -> tuple[dict[str, Tensor], list[str]]:
    message = "'blocks..' runs as it is written .* its own forward attends to what other ranks"
    with pytest.warns(UserWarning, match=message):
        found, report = trained("by_hand", {**plan, **COMPILED}, LENGTHS)
    return found, [block.eager for block in report.values()]


@pytest.mark.slow
def test_a_block_that_attends_itself_runs_as_it_is_written(world2: World) -> None:
    expected, _ = trained("by_hand", None, LENGTHS)
    for found, eager in world2.run(trained_with_a_warning, {CP: 2}):
        assert all(eager)
        for name, x in found.items():
            # As above.
            torch.testing.assert_close(x, expected[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "bert", "qwen3_moe"])
def test_so_they_are_of_every_family(world2: World, family: str, plan: str) -> None:
    check(world2, family, PLANS[plan])


@pytest.mark.nightly
@pytest.mark.parametrize("plan", AT_NIGHT)
@pytest.mark.parametrize("kind", ["llama", "net"])
def test_so_they_are_with_other_dimensions(world4: World, kind: str, plan: str) -> None:
    check(world4, kind, AT_NIGHT[plan])


@pytest.mark.nightly
def test_ranks_of_a_sequence_share_experts(world2: World) -> None:
    check(world2, "qwen3_moe", {CP: 2, EP: 2})


def compiled_by_itself(kind: str, plan: Constraints, *, before: bool) -> dict[str, Tensor]:
    """Return losses of a program that compiles the blocks itself, before or after."""
    model: Any = model_of(kind)
    blocks = [*model.blocks]
    for block in blocks if before else ():
        block.compile(backend="aot_eager")
    model = vescale.parallelize(make_plan(plan), model)
    for block in () if before else blocks:
        block.compile(backend="aot_eager")
    found = dict[str, Tensor]()
    for step, length in enumerate(LENGTHS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what it does not follow
            loss = model(**rows_of(model, batch_of(step, length, "")))
        loss.backward()
        found[f"loss {step}"] = loss.detach()
    named: Any = model.named_parameters()
    return found | {n: whole(p.grad).clone() for n, p in named if p.grad is not None}


@pytest.mark.nightly
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["net", "by_hand"])
def test_programs_may_compile_blocks_on_slices_themselves(
    world2: World, kind: str, plan: str, before: bool
) -> None:
    model = model_of(kind)
    for step, length in enumerate(LENGTHS):
        model(**batch_of(step, length, "")).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    run = functools.partial(compiled_by_itself, kind, PLANS[plan], before=before)
    for found in world2.run(run):
        for name, grad in expected.items():
            # As above.
            torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12, msg=name)


def as_one_graph(kind: str) -> None:
    model: Any = vescale.parallelize(make_plan({CP: 2}), model_of(kind))
    model.blocks[1].compile(backend="aot_eager", fullgraph=True)
    model(**rows_of(model, batch_of(0, 12, "")))


@pytest.mark.parametrize(
    ("kind", "within"), [("net", "'blocks.1.attention' within it"), ("by_hand", "it")]
)
def test_a_block_on_slices_as_one_graph_is_refused_by_name(
    world2: World, kind: str, within: str
) -> None:
    message = rf"'blocks.1' was compiled with fullgraph=True, and {within} has to be left out"
    refused(world2, ValueError, message, as_one_graph, kind)
