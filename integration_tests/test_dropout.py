"""Training with dropout under every kind of plan draws the masks of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vescale
from vescale_testing import World

from . import coupled_layers, masked_models
from .families import InDouble
from .judge import Trial, judge
from .models import ReturnsLoss, batches
from .plans import DP, SEQUENCE, TP, ZERO, Constraints, make_plan
from .training import whole

ROWS, LENGTH, STEPS = 4, 11, 2  # a length that does not divide into the ranks


class Attention(nn.Module):
    """Dropout of attention's weights, inside of torch's function, and of what it returns."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x_BSF: Tensor) -> Tensor:
        q, k, v = (
            layer(x_BSF).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True
        )
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))


class Block(nn.Module):
    """Dropout as a module and as a function, of whole activations and of cut features."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BSF: Tensor) -> Tensor:
        x_BSF = x_BSF + self.attention(self.norms[0](x_BSF))
        y_BSF = F.dropout(F.gelu(self.up(self.norms[1](x_BSF))), 0.1, self.training)
        return x_BSF + F.dropout(self.down(y_BSF), 0.3, self.training)


class HandWritten(nn.Module):
    """Draws noise, too, and something of which all ranks need the same."""

    def __init__(self, vocabulary: int = 37, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(4)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        x_BSF = self.embed(batch["input_ids"])
        if self.training:
            x_BSF = x_BSF + 0.1 * torch.randn_like(x_BSF) * torch.rand(
                x_BSF.shape[-1], device=x_BSF.device
            )
        x_BSF = self.dropout(x_BSF)
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return F.cross_entropy(self.head(x_BSF).flatten(0, 1), batch["labels"].flatten())


def build(name: str) -> nn.Module:
    """Return a freshly initialised model, float64 and in training mode."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return HandWritten() if name == "hand_written" else _of_transformers(name).train()
    finally:
        torch.set_default_dtype(torch.float32)


class Translates(nn.Module):
    """A model of an encoder and a decoder; its loss is computed from its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        ids_BS = batch["input_ids"]
        logits_BSV = self.model(input_ids=ids_BS, decoder_input_ids=ids_BS[:, :7]).logits
        return F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"][:, :7].flatten())


def _of_transformers(name: str) -> nn.Module:
    # Without caches: a block that runs again would append to one a second time.
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        BertConfig,
        GPT2Config,
        T5Config,
    )

    kind, _, attention = name.partition("-")
    match kind:
        case "gpt2":
            gpt2 = GPT2Config(
                vocab_size=61, n_positions=64, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.2,
                bos_token_id=0, eos_token_id=0, use_cache=False,
            )  # fmt: skip
            return ReturnsLoss(
                AutoModelForCausalLM.from_config(gpt2, attn_implementation=attention)
            )
        case "bert":
            bert = BertConfig(
                vocab_size=64, num_hidden_layers=4, hidden_size=32, intermediate_size=48,
                num_attention_heads=4,
            )  # fmt: skip
            return ReturnsLoss(
                AutoModelForMaskedLM.from_config(bert, attn_implementation=attention)
            )
        case _:
            t5 = T5Config(
                vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4,
                use_cache=False,
            )  # fmt: skip
            return Translates(AutoModelForSeq2SeqLM.from_config(t5))


@dataclass(frozen=True)
class Record:
    """Losses and full gradients of every step, and the state of the generator at the end."""

    losses: list[float]
    grads: list[dict[str, Tensor]]
    state: Tensor


def train(name: str, constraints: Constraints | None, device: str) -> Record:
    """Take a few steps of plain gradient descent on one device, or under a plan."""
    model = build(name).to(device)
    given, rows = batches(STEPS, ROWS, LENGTH), slice(None)
    if constraints is not None:
        dataset = [{k: v[row] for k, v in given[0].items()} for row in range(ROWS)]
        plan = make_plan({"batch.global_size": ROWS, **constraints})
        model, _ = vescale.parallelize(plan, model, None, None, dataset)
        own = torch.distributed.get_rank() // plan.tensor_parallel.size
        part = ROWS // plan.data_parallel.size
        rows = slice(own * part, (own + 1) * part)
    torch.manual_seed(7)
    losses: list[float] = []
    grads: list[dict[str, Tensor]] = []
    for batch in given:
        with InDouble():
            loss = model({k: v[rows].to(device) for k, v in batch.items()})
        loss.backward()
        losses.append(loss.item())
        grads.append(
            {k: whole(p.grad).cpu() for k, p in model.named_parameters() if p.grad is not None}
        )
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
        model.zero_grad()
    return Record(losses, grads, random_state(device))


def random_state(device: str) -> Tensor:
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


class Lambda(nn.Module):
    """A block whose forward is a function that holds its layers, as minGPT has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.3)
        layers = nn.ModuleDict({"up": self.up, "down": self.down, "dropout": self.dropout})
        self.mlp = lambda x: layers["dropout"](layers["down"](F.gelu(layers["up"](x))))

    def forward(self, x_BSF: Tensor) -> Tensor:
        return x_BSF + self.mlp(self.norm(x_BSF))


def lambda_losses(constraints: Constraints | None) -> list[float]:
    """Return losses of a model of such blocks, called with (time x rows), or of one device."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(Lambda(), Lambda()).double()
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
    torch.manual_seed(7)
    x = torch.randn(5, 4, 8, dtype=torch.float64)
    return [model(x).square().mean().item() for _ in range(2)]


@cache
def on_one_device(name: str, device: str) -> Record:
    state = torch.get_rng_state()
    try:
        return train(name, None, device)
    finally:
        torch.set_rng_state(state)


def check(world: World, name: str, plan: Constraints, device: str = "cpu") -> None:
    expected = on_one_device(name, device)
    for record in world.run(train, name, plan, device):
        assert record.losses == pytest.approx(expected.losses, rel=1e-12, abs=0)
        for found, grads in zip(record.grads, expected.grads, strict=True):
            assert [*found] == [*grads]
            for fqn, grad in grads.items():
                scale = float(grad.abs().max())
                # Where the true gradient is zero, as that of the bias of keys, rounding is left.
                torch.testing.assert_close(
                    found[fqn], grad, rtol=0, atol=1e-12 * (scale + 1e-3), msg=fqn
                )
        assert torch.equal(record.state, expected.state)


TWO: dict[str, Constraints] = {
    "tp": {TP: 2},
    "tp-sequence": {TP: 2, SEQUENCE: True},
    "tp-recompute": {TP: 2, "recompute": "full"},
    "dp": {DP: 2},
    "zero1": {DP: 2, ZERO: 1},
    "zero3": {DP: 2, ZERO: 3},
    "zero3-recompute": {DP: 2, ZERO: 3, "recompute": "full"},
}
FOUR: dict[str, Constraints] = {
    "tp": {TP: 4},
    "tp-sequence": {TP: 4, SEQUENCE: True},
    "tp-dp": {TP: 2, DP: 2},
    "hybrid2": {DP: 4, ZERO: 2, "data_parallel.replicate_size": 2},
    "tp-sequence-zero3-recompute": {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3, "recompute": "full"},
}
MODELS = ("hand_written", "gpt2-eager", "gpt2-sdpa", "bert-eager", "bert-sdpa")


PLANS = {2: TWO, 4: FOUR}
EVERYTHING = [(ranks, plan, name) for ranks in PLANS for plan in PLANS[ranks] for name in MODELS]
# By day every plan of two ranks with one model, and other models with some plan.
BY_DAY = {
    *((2, plan, "hand_written") for plan in TWO),
    (2, "tp-sequence", "gpt2-sdpa"),
    (2, "zero3-recompute", "bert-sdpa"),
    (4, "hybrid2", "gpt2-eager"),
}


def marked(case: tuple[int, str, str]) -> Any:
    marks = pytest.mark.slow if case in BY_DAY else pytest.mark.nightly
    return pytest.param(*case, marks=marks)


@pytest.mark.by_day("2-tp-recompute-hand_written")
@pytest.mark.parametrize(("ranks", "plan", "name"), [marked(case) for case in EVERYTHING])
def test_ranks_draw_what_one_device_draws(
    world2: World, world4: World, ranks: int, plan: str, name: str
) -> None:
    check({2: world2, 4: world4}[ranks], name, PLANS[ranks][plan])


@pytest.mark.by_day("zero3")
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["tp", "zero3"])
def test_an_encoder_and_a_decoder_draw_what_one_device_draws(world2: World, plan: str) -> None:
    # No blocks that run again: the cast of its norms to float32 is not turned off in backward.
    check(world2, "t5", TWO[plan])


# As many rows a rank as there are steps of time; or fewer; or more.
NO_EXAMPLE: list[tuple[str, int, int, Constraints]] = [
    ("time_first_dropout", 2, 10, {DP: 2}),
    ("folded_dropout_time_outer", 2, 10, {DP: 2, ZERO: 3}),
    ("time_first_dropout", 4, 10, {TP: 2, DP: 2}),
    ("folded_dropout_time_outer", 4, 6, {TP: 2, DP: 2}),
    ("folded_dropout_rows_outer", 2, 10, {DP: 2, ZERO: 2}),
    ("lstm_dropout", 2, 10, {DP: 2, ZERO: 1}),
    ("gru_rows_first_dropout", 2, 6, {DP: 2}),
    ("time_first_dropout", 2, 6, {DP: 2, ZERO: 2, "recompute": "full"}),
]


@pytest.mark.by_day("time_first_dropout-2-10-plan0", "folded_dropout_time_outer-2-10-plan1")
@pytest.mark.parametrize(
    ("name", "ranks", "rows", "plan"),
    [
        pytest.param(*case, marks=pytest.mark.slow if index < 3 else pytest.mark.nightly)
        for index, case in enumerate(NO_EXAMPLE)
    ],
)
def test_without_a_data_set_ranks_draw_what_one_device_draws(
    world2: World, world4: World, name: str, ranks: int, rows: int, plan: Constraints
) -> None:
    trial = Trial(
        build=partial(coupled_layers.build, name),
        batches=partial(coupled_layers.batches, name, rows),
        optimizer="adamw",
        loader=False,
    )
    judgement = judge({2: world2, 4: world4}, trial, ranks, plan)
    assert judgement.verdict == "equal", judgement.detail


def test_layers_in_a_closure_draw_what_one_device_draws(world2: World) -> None:
    plan: Constraints = {
        TP: 2,
        "tensor_parallel.sharding_policy": "manual",
        "tensor_parallel.sharding_plan": {
            "*.up.weight": "Shard(0)",
            "*.up.bias": "Shard(0)",
            "*.down.weight": "Shard(1)",
        },
    }
    state = torch.get_rng_state()
    expected = lambda_losses(None)
    torch.set_rng_state(state)
    for found in world2.run(lambda_losses, plan):
        assert found == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.by_day("IsGivenItsMask-tp")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if plan == "tp" else pytest.mark.nightly)
        for name in masked_models.MODELS
        for plan in ("tp", "tp-recompute", "zero3")
    ],
)
def test_a_forward_that_looks_at_its_mask_draws_what_one_device_draws(
    world2: World, name: str, plan: str
) -> None:
    trial = Trial(
        build=partial(masked_models.build, name), batches=partial(masked_models.batches, name)
    )
    judgement = judge({2: world2}, trial, 2, TWO[plan])
    assert judgement.verdict == "equal", judgement.detail
