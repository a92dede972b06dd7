"""torch's own attention layers, cut by heads, are those of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_parallel import ShardingProposal, propose_sharding
from vescale_parallel._tensor_parallel.tensor_sharding import shard
from vescale_parallel._verify.manual_plan import checked_plan

from .one_device import check_against_one_device, proposed

WIDTH, LENGTH, ROWS = 12, 6, 2
X = torch.linspace(-1, 1, ROWS * LENGTH * WIDTH, dtype=torch.float64).sin().view(2, 6, 12)
PADDING = torch.zeros(ROWS, LENGTH, dtype=torch.bool).index_fill(1, torch.tensor([5]), True)
PADDED = torch.zeros_like(PADDING, dtype=torch.float64).masked_fill_(PADDING, -torch.inf)
CAUSAL = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
PER_HEAD = torch.arange(ROWS * 4 * LENGTH * LENGTH).view(-1, LENGTH, LENGTH).sin().double()

Options = dict[str, Any]
CALLS: dict[str, tuple[Options, Options]] = {
    "without weights": ({}, {"need_weights": False}),
    "with mean weights": ({}, {}),
    "with every head's weights": ({}, {"average_attn_weights": False}),
    "without bias": ({"bias": False}, {}),
    "sequence first": ({"batch_first": False}, {"need_weights": False}),
    "causal": ({}, {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "padding": ({}, {"key_padding_mask": PADDING}),
    "both masks": ({}, {"key_padding_mask": PADDING, "attn_mask": CAUSAL != 0}),
    "padding and causal": (
        {},
        {"key_padding_mask": PADDED, "attn_mask": CAUSAL, "is_causal": True,
         "need_weights": False},
    ),
    "a mask for every head": ({}, {"attn_mask": PER_HEAD, "need_weights": False}),
}  # fmt: skip


class Attending(nn.Module):
    """Blocks of attention; keys and values are the queries, or others."""

    def __init__(
        self, call: Options, *, cross: bool = False, unbatched: bool = False, **given: Any
    ):
        super().__init__()
        self.call, self.cross, self.unbatched = call, cross, unbatched
        given = {"num_heads": 4, "batch_first": True, **given}
        self.layers = nn.ModuleList([nn.MultiheadAttention(WIDTH, **given) for _ in range(3)])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weights: list[Tensor] = []
        if self.unbatched:
            x = x[0]
        elif not self.get_submodule("layers.0").__dict__["batch_first"]:
            x = x.transpose(0, 1)
        memory = x.cos()
        for layer in self.layers:
            others = (memory, memory.sin()) if self.cross else (x, x)
            y, each = layer(x, *others, **self.call)
            x = x + y
            weights += [] if each is None else [each]
        return x, *weights


def assert_cut(found: ShardingProposal) -> None:
    assert found.plan["layers.*.in_proj_weight"] == "InterleavedShard(0, 3)"
    assert found.plan["layers.*.out_proj.weight"] == "Shard(1)"


@pytest.mark.by_day(
    "with mean weights-2", "with every head's weights-2", "without bias-2", "sequence first-4"
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_every_option_is_that_of_one_device(name: str, size: int) -> None:
    given, call = CALLS[name]
    assert_cut(proposed(partial(Attending, call, **given), (X,), size))


@pytest.mark.parametrize("call", [{"need_weights": False}, {}], ids=["fast", "weights"])
@pytest.mark.parametrize(
    "kind", [{"cross": True}, {"unbatched": True}], ids=["cross", "unbatched"]
)
def test_other_inputs_are_those_of_one_device(kind: Options, call: Options) -> None:
    assert_cut(proposed(partial(Attending, call, **kind), (X,), 2))


class Encoder(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, batch_first=True, **given)
        self.inner = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, mask=CAUSAL, is_causal=True)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, 4, 24, batch_first=True)
        self.inner = nn.TransformerDecoder(layer, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.cos(), tgt_mask=CAUSAL)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(WIDTH, 4, 2, 2, 24, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x.cos())


@pytest.mark.by_day("Encoder-inner.layers.*.self_attn", "make1-inner.layers.*.self_attn")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (Encoder, "inner.layers.*.self_attn"),
        (partial(Encoder, norm_first=True), "inner.layers.*.self_attn"),
        (Decoder, "inner.layers.*.multihead_attn"),
        (Both, "inner.decoder.layers.*.multihead_attn"),
    ],
)
def test_layers_of_torch_are_cut(make: Callable[[], nn.Module], pattern: str) -> None:
    plan = proposed(make, (X,), 2).plan
    assert plan[f"{pattern}.in_proj_weight"] == "InterleavedShard(0, 3)"
    # Whether a mask is causal the decoder reads from its values: only attention is recognised.
    if make is not Decoder:
        assert plan[f"{pattern.rpartition('.')[0]}.linear1.weight"] == "Shard(0)"


def test_the_sequence_is_cut_around_attention() -> None:
    model = Encoder(norm_first=True).double()
    found = propose_sharding(model, "auto", 2, sequence=True, example_batch=(X,))
    assert found.plan["inner.layers.*.self_attn.<leave>"] == "Shard(1)"
    check_against_one_device(model, (X,), found.plan, 2)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"num_heads": 3}, "its 3 heads are not divisible by 2"),
        ({"add_bias_kv": True}, "adds a key and value of its own"),
        ({"kdim": WIDTH, "vdim": 8}, "another width than its queries"),
    ],
)
def test_what_cannot_be_cut_by_heads_stays_whole_with_the_reason(given: Options, why: str) -> None:
    class Other(Attending):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            for layer in self.layers:
                value = x[..., : layer.vdim]  # pyright: ignore[reportArgumentType,reportCallIssue,reportIndexIssue]: an int
                x = x + layer(x, x, value, need_weights=False)[0]
            return (x,)

    found = proposed(partial(Other, {}, **given), (X,), 2)
    assert not found.plan
    assert why in found.left_whole["layers.*.in_proj_weight"]


@pytest.mark.parametrize(
    "plan",
    [
        {"layers.*.in_proj_weight": "Shard(0)", "layers.*.out_proj.weight": "Shard(1)"},
        {"layers.*.out_proj.weight": "Shard(1)"},
        {"layers.*.in_proj_weight": "InterleavedShard(0, 3)"},
    ],
)
def test_attention_cut_in_another_way_is_refused_by_name(plan: dict[str, str]) -> None:
    model = Attending({})
    with pytest.raises(
        ValueError, match=r"expected in_proj_weight and in_proj_bias of 'layers\.0'"
    ):
        checked_plan(model, shard(plan, model, 2), (X.float(),))
