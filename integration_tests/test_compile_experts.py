"""Blocks with experts that several ranks share, compiled: the numbers of one device."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from torch import Tensor

import vescale
from vescale_parallel import CompiledBlock
from vescale_testing import World

from .compiled_training import train_steps
from .experts import FAMILIES, build, rows_of, tokens
from .listed_experts import BATCHED, LAYERS, Model
from .plans import DP, EP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .test_bad_input import check as refused

COMPILED: Constraints = {"compile": "blocks", "compile_backend": "aot_eager"}
PLANS: dict[str, Constraints] = {
    "ep": {DP: 2, EP: 2},
    "ep-zero3-recompute": {DP: 2, EP: 2, ZERO: 3, "recompute": "full"},
}
AT_NIGHT: dict[str, Constraints] = {
    "tp": {TP: 2, DP: 2, EP: 2},
    "pp": {PP: 2, PARTS: 2, DP: 2, EP: 2},
    "dp-zero3": {DP: 4, EP: 2, ZERO: 3},
}
LENGTHS = (6, 6, 4, 5)


def model_of(kind: str) -> Any:
    """Return a model of transformers, or of layers as people write them, in float64."""
    return build(kind) if kind in FAMILIES else Model(kind)


def trained(
    kind: str, constraints: Constraints | None
) -> tuple[dict[str, Tensor], dict[str, CompiledBlock]]:
    """Return losses, the gradients of the first step and parameters; and what was compiled."""
    model = model_of(kind)
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
    batches = (
        {name: x[:, :length].contiguous() for name, x in rows_of(model, tokens(step)).items()}
        for step, length in enumerate(LENGTHS)
    )
    return train_steps(model, batches, is_compiled="compile" in (constraints or {}))


def check(world: World, kind: str, constraints: Constraints, *, relative: float = 1e-10) -> None:
    """Compare blocks that are compiled with one device.

    Norms and routers of transformers' families compute in float32, whatever the dtype: those are
    compared with the same plan whose blocks run as they are written, which is one device's.
    """
    plan = constraints if kind in FAMILIES else None
    expected = trained(kind, None)[0] if plan is None else world.run(trained, kind, plan)[0][0]
    graphs = 0
    for found, report in world.run(trained, kind, {**constraints, **COMPILED}, timeout=400):
        assert found.keys() == expected.keys()
        for name, x in found.items():
            # To which compiled blocks are one device's (docs/howto/compile.md): compilers round
            # otherwise than operators do.
            atol = relative * float(expected[name].abs().max())
            torch.testing.assert_close(x, expected[name], rtol=0, atol=atol, msg=name)
        graphs += min(sum(block.num_graphs for block in report.values()), 1)
    assert graphs


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"), [("DeepSeek", "ep"), ("AllTokens", "ep-zero3-recompute")]
)
def test_blocks_with_experts_are_compiled(world2: World, kind: str, plan: str) -> None:
    check(world2, kind, PLANS[plan])


@pytest.mark.nightly
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", [*FAMILIES, *LAYERS, *BATCHED])
def test_so_they_are_of_every_kind(world2: World, kind: str, plan: str) -> None:
    check(world2, kind, PLANS[plan])


@pytest.mark.nightly
@pytest.mark.parametrize("plan", AT_NIGHT)
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "AllTokens"])
def test_so_they_are_with_other_dimensions(world4: World, kind: str, plan: str) -> None:
    check(world4, kind, AT_NIGHT[plan])


@pytest.mark.nightly
def test_breaks_are_listed_where_tokens_are_sent(world2: World) -> None:
    for _, report in world2.run(trained, "AllTokens", {**PLANS["ep"], **COMPILED}):
        for block in report.values():
            (where,) = block.breaks
            file, line, why = where.split(":", 2)
            assert "self.experts(" in linecache.getline(file, int(line))
            assert "tokens are sent to experts of other ranks" in why


def as_one_graph() -> None:
    model: Any = vescale.parallelize(make_plan(PLANS["ep"]), model_of("AllTokens"))
    model.compile(backend="aot_eager")  # of a whole model nothing is compiled, as it says
    model.blocks[0].compile(backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="compiles nothing"):
        model(**rows_of(model, tokens(0)))


def test_a_block_with_experts_as_one_graph_is_refused_by_name(world2: World) -> None:
    message = (
        r"'blocks.0' was compiled with fullgraph=True, and 'blocks.0.moe.experts' within it has to"
    )
    refused(world2, ValueError, message, as_one_graph)
