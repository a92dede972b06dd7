"""Mixers of Mamba 2 of which all heads share one group of states, sharded by heads."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_parallel import explain, propose_sharding
from vescale_testing import World

from .families import InDouble, hugging_face, tokens
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints
from .sharded_layers import SIZES, LanguageModel, compare
from .test_bad_input import check as check_refusal
from .training import whole

BACKEND = "compile_backend"
# Of 32 features, twice as many in the mixer, which are 8 heads.
_MIXER = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1,
          "mamba_chunk_size": 4}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "bamba": {**_MIXER, "mamba_proj_bias": True, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MIXER, "num_local_experts": 0, "shared_intermediate_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "falcon_h1": {
        **_MIXER, "mamba_d_ssm": 64, "mamba_rms_norm": True, "head_dim": 8,
        "ssm_multipliers": [0.3, 0.7, 1.3, 0.6, 1.7],
    },
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1,
        "chunk_size": 4, "head_dim": 8,
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention"],
    },
    "mamba2": {
        "num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1, "chunk_size": 4,
    },
}  # fmt: skip


class GatedNorm(nn.Module):
    """A norm over all features, of what a gate scales, which it may be called without."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor, eps: float = 1e-6, gate: Tensor | None = None) -> Tensor:
        if gate is not None:
            x = x * F.silu(gate)
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Mixer(nn.Module):
    """Heads and what all of them use in one projection, and in one convolution."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(32)
        self.num_heads, self.inner = heads, 8 * heads
        self.mixed_width = self.inner + 8
        self.in_proj = nn.Linear(32, 2 * self.inner + 8)
        self.register_buffer("scales", 0.5 + torch.rand(2 * self.inner + 8))
        self.conv = nn.Conv1d(
            self.mixed_width, self.mixed_width, 3, groups=self.mixed_width, padding=2
        )
        self.norm = GatedNorm(self.inner)
        self.out_proj = nn.Linear(self.inner, 32)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.in_proj(self.before(x)) * self.get_buffer("scales")
        gate, mixed = packed.split([self.inner, self.mixed_width], -1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., :-2].transpose(1, 2))
        values, states = mixed.split([self.inner, 8], -1)
        heads = values.unflatten(-1, (self.num_heads, 8)) * states.unsqueeze(-2)
        return x + self.out_proj(self.norm(heads.cumsum(1).flatten(2), gate=gate))


def mixers(heads: int = 4) -> nn.Module:
    return LanguageModel(partial(Mixer, heads))


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "by_hand":
        model: nn.Module = mixers().double()
    else:
        model = hugging_face(name, "eager", **{**SIZES, **_CONFIGS[name]}).double()
    for fqn, parameter in model.named_parameters():
        if parameter.dim() == 1:  # not all of one value, as they are drawn
            nn.init.normal_(parameter, float("norm" in fqn or fqn.endswith("D")), 0.3)
    return model


MIXERS = {
    "bamba": "model.layers.*.mamba",
    "granitemoehybrid": "model.layers.*.mamba",
    "falcon_h1": "model.layers.*.mamba",
    "nemotron_h": "model.layers.*.mixer",
    "mamba2": "backbone.layers.*.mixer",
    "by_hand": "blocks.*",
}


def batch() -> dict[str, Tensor]:
    return tokens() | {"labels": tokens()["input_ids"]}


@pytest.mark.by_day("False-by_hand")
@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("sequence", [False, True])
def test_their_layers_are_sharded(name: str, sequence: bool) -> None:
    model = build(name)
    found = propose_sharding(model, "auto", 2, sequence=sequence, example_batch=batch())
    sharded = found.sharded_parameters(model)
    blocks = {n for n, p in model.named_parameters() if p.dim() > 1 and ".0." in n}
    assert blocks <= sharded
    assert found.plan[f"{MIXERS[name]}.norm.<whole>"] == "Shard(2)"
    assert found.plan[f"{MIXERS[name]}.norm.<whole:gate>"] == "Shard(2)"


@pytest.mark.by_day("by_hand")
@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_two_ranks_have_the_losses_and_gradients_of_one(world2: World, name: str) -> None:
    compare(world2, build, name, {TP: 2})


@pytest.mark.by_day("*'compile': 'blocks'*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("bamba", {TP: 4, SEQUENCE: True}),
        ("mamba2", {TP: 2, DP: 2, ZERO: 1}),
        ("by_hand", {TP: 2, DP: 2, ZERO: 3, "recompute": "full"}),
        ("by_hand", {TP: 2, DP: 2, ZERO: 2, "compile": "blocks", BACKEND: "aot_eager"}),
        *itertools.product(
            MIXERS,
            (
                {TP: 4},
                {TP: 2, DP: 2, ZERO: 2, SEQUENCE: True},
                {TP: 2, DP: 2, ZERO: 3, SEQUENCE: True},
                {TP: 2, PP: 2, PARTS: 2},
            ),
        ),
    ],
    ids=str,
)
def test_four_ranks_have_the_losses_and_gradients_of_one(
    world4: World, name: str, constraints: Constraints
) -> None:
    compare(world4, build, name, constraints)


def steps(name: str, constraints: Constraints | None) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of some steps of AdamW, and the parameters behind them."""
    model: Any = build(name)
    rows = batch()

    def make(each: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(each.parameters(), lr=1e-2, weight_decay=0.1)

    if constraints is None:
        optimizer = make(model)
    else:
        plan = vescale.generate_plan(model, constraints, world_size=4, example_batch=rows)
        model, optimizer = vescale.parallelize(plan, model, make)
        part, parts = vescale.data_parallel_rank(model), plan.data_parallel.size
        rows = {key: each.chunk(parts)[part] for key, each in rows.items()}
    losses: list[float] = []
    for _ in range(4):
        with InDouble():
            loss = model(**rows).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {key: whole(each) for key, each in model.named_parameters()}


@pytest.mark.by_day("mamba2")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bamba", "mamba2"])
def test_parameters_after_steps_of_adamw_are_those_of_one_device(world4: World, name: str) -> None:
    losses, parameters = steps(name, None)
    runs = world4.run(steps, name, {TP: 2, DP: 2, ZERO: 3, SEQUENCE: True})
    mean = [sum(each) / len(runs) for each in zip(*(found for found, _ in runs), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-12)
    for _, found in runs:
        assert found.keys() == parameters.keys()
        for name, each in found.items():
            # AdamW divides by roots of gradients, and rounding of small ones counts for more.
            torch.testing.assert_close(each, parameters[name], rtol=0, atol=1e-11, msg=name)


def generated(name: str, constraints: Constraints | None) -> Tensor:
    model: Any = build(name).eval()
    if constraints is not None:
        plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=tokens())
        model = vescale.parallelize(plan, model)
        # Calls with what calls before them kept cannot be compared: ranks have parts of it.
        warnings.filterwarnings("ignore", "the sharding plan was not compared")
    return model.generate(tokens()["input_ids"], max_new_tokens=6, do_sample=False)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"])
def test_models_with_them_generate(world2: World, name: str) -> None:
    expected = generated(name, None)
    assert all(torch.equal(each, expected) for each in world2.run(generated, name, {TP: 2}))


def explained() -> tuple[dict[str, int], str]:
    """Return calls of all-gathers by module, and what explain says."""
    model: Any = build("by_hand")
    plan = vescale.generate_plan(model, {TP: 2}, world_size=2, example_batch=batch())
    model = vescale.parallelize(plan, model)
    with explain(model) as explanation:
        model(**batch())
    gathers = [each for each in explanation.traffic if each.forward == "all_gather"]
    return {each.module: each.calls for each in gathers}, str(explanation)


@pytest.mark.slow
def test_a_norm_and_its_gate_are_gathered_and_integers_counted(world2: World) -> None:
    for gathered, shown in world2.run(explained):
        assert gathered == {"blocks.*.norm": 4}  # the features and the gate of two blocks
        assert "mixed_width as conv.weight is read" in shown


def marked(marks: dict[str, str]) -> None:
    model = mixers()
    plan = vescale.generate_plan(
        model, {TP: 2, "tensor_parallel.sharding_policy": "manual",
                "tensor_parallel.sharding_plan": marks},
        world_size=2,
    )  # fmt: skip
    vescale.parallelize(plan, model)


@pytest.mark.by_day("*-no parts are read whole*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"blocks.*.norm.<whole:gat>": "Shard(2)"}, r"for an argument of 'blocks.0.norm', of \["),
        ({"blocks.*.norm.<whole:gate>": "Shard(2)"}, r"beside blocks.0.norm.<whole>"),
        ({"blocks.*.<attr:inner>": "Shard(0) of conv.weight"}, "no parts are read whole"),
        ({"blocks.*.<attr:inner>": "Shard(1)"}, r"'Shard\(0\) of name.weight'"),
    ],
    ids=str,
)
def test_marks_that_fit_nothing_are_refused(
    world2: World, marks: dict[str, str], said: str
) -> None:
    check_refusal(world2, ValueError, said, marked, marks)


@pytest.mark.slow
def test_heads_that_do_not_divide_stay_whole() -> None:
    torch.manual_seed(3)
    found = propose_sharding(mixers(heads=6).double(), "auto", 4, example_batch=batch())
    assert not any("in_proj" in name for name in found.plan)
    assert "length 6 is not divisible by 4" in str(found.left_whole)
