"""Biases of attention that differ by head and are no parameters, as those of ALiBi."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BloomConfig

import vescale
from vescale_parallel import explain, propose_sharding, tensor_parallel_plan
from vescale_testing import World

from . import invariant_bits
from .families import hugging_face, tokens
from .plans import DP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints, make_plan
from .sharded_layers import compare
from .test_bad_input import check as check_refusal
from .training import whole

WIDTH, HEADS, VOCABULARY = 64, 4, invariant_bits.VOCABULARY
TENSOR = "tensor_parallel"


def slopes() -> Tensor:
    return torch.tensor([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])


def distances(length: int) -> Tensor:
    return torch.arange(length)[None, None, :].float()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def bias(self, length: int) -> Tensor:
        """Return what is added to scores, of shape (heads, 1, length)."""
        raise NotImplementedError

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        split = (y.view(b, t, self.num_heads, -1) for y in self.qkv(x).chunk(3, -1))
        bias = self.bias(t) if bias is None else bias
        mask = bias.to(x.dtype).expand(b, self.num_heads, t, t)
        y = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in split), attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class OfSlopes(Attention):
    """Multiplies a buffer of each head's slope."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes(), persistent=False)

    def bias(self, length: int) -> Tensor:
        return self.get_buffer("slopes")[:, None, None] * distances(length)


class OfTable(Attention):
    """Slices a buffer of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", slopes()[None, :, None, None] * distances(64))

    def bias(self, length: int) -> Tensor:
        return self.get_buffer("table")[0, :, :, :length]


class Biases(nn.Module):
    """Makes biases from a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", slopes())

    def forward(self, length: int) -> Tensor:
        return self.get_buffer("slopes")[:, None, None] * distances(length)


class OfModule(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.biases = Biases()

    def bias(self, length: int) -> Tensor:
        return self.biases(length)


class Block(nn.Module):
    def __init__(self, attention: Callable[[], Attention]) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), attention()

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x + self.attn(self.norm(x), bias=bias)


class Model(nn.Module):
    """Computes biases itself, for all of its blocks, if their attention has none."""

    def __init__(self, attention: Callable[[], Attention]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.makes_biases = attention is Attention

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, bias = self.embed(input_ids), None
        if self.makes_biases:
            bias = slopes()[:, None, None] * distances(input_ids.shape[1])
        for block in self.blocks:
            x = block(x, bias)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


BY_HAND: dict[str, Callable[[], Attention]] = {
    "slopes": OfSlopes,
    "table": OfTable,
    "module": OfModule,
    "argument": Attention,
}
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": WIDTH, "n_layer": 2, "n_head": HEADS},
    "mpt": {"d_model": WIDTH, "n_layers": 2, "n_heads": HEADS, "max_seq_len": 64},
    "falcon": {
        "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
        "alibi": True, "multi_query": False, "new_decoder_architecture": False,
    },
}  # fmt: skip
SAID = {
    "slopes": {"blocks.*.attn.<read:slopes>": "Shard(0)"},
    "table": {"blocks.*.attn.<read:table>": "Shard(1)"},
    "module": {"blocks.*.attn.biases.<read:slopes>": "Shard(0)"},
    "argument": {"blocks.*.attn.<slice:bias>": "Shard(0)"},
    "bloom": {"transformer.h.*.self_attention.<slice:alibi>": "Shard(0) of each row"},
    "mpt": {"transformer.blocks.*.attn.<slice:position_bias>": "Shard(0)"},
    "falcon": {"transformer.h.*.self_attention.<slice:alibi>": "Shard(1)"},
}


def build(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name in BY_HAND:
        return Model(BY_HAND[name]).double()
    return hugging_face(name, "eager", **SIZES, **FAMILIES[name]).double()


@pytest.mark.by_day("slopes", "table", "module", "argument")
@pytest.mark.parametrize("name", SAID)
def test_ranks_read_their_heads_of_biases(name: str) -> None:
    model = build(name)
    plan = propose_sharding(model, "auto", 2, example_batch=tokens()).plan
    assert SAID[name].items() <= plan.items()
    # Every matrix is sharded.
    owners = {fqn for fqn, module in model.named_modules() if isinstance(module, nn.Linear)}
    said = {pattern.replace(".*.", f".{n}.") for pattern in plan for n in range(2)}
    assert {f"{fqn}.weight" for fqn in owners} <= said


@pytest.mark.by_day("argument")
@pytest.mark.parametrize("name", ["slopes", "argument", "bloom"])
def test_two_ranks_have_the_losses_and_gradients_of_one(world2: World, name: str) -> None:
    compare(world2, build, name, {TP: 2})


COMPILED: Constraints = {"compile": "blocks", "compile_backend": "aot_eager"}
PLANS: list[Constraints] = [
    {TP: 4},
    {TP: 2, SEQUENCE: True, DP: 2, ZERO: 3},
    {TP: 2, PP: 2, PARTS: 2},
    {TP: 2, DP: 2, **COMPILED},
]


SAMPLE = [("bloom", PLANS[1]), ("argument", PLANS[2]), ("table", PLANS[3]), ("mpt", PLANS[0])]


@pytest.mark.by_day("argument-*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constraints"),
    SAMPLE,
    ids=str,
)
def test_plans_of_four_ranks(world4: World, name: str, constraints: Constraints) -> None:
    compare(world4, build, name, constraints)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("constraints", PLANS, ids=str)
def test_four_ranks_have_the_losses_and_gradients_of_one(
    world4: World, name: str, constraints: Constraints
) -> None:
    compare(world4, build, name, constraints)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slopes", "argument"])
def test_blocks_that_run_again_read_them_again(world2: World, name: str) -> None:
    compare(world2, build, name, {TP: 2, "recompute": "full"})


def explained(name: str) -> str:
    plan = vescale.generate_plan(build(name), {TP: 2}, world_size=2, example_batch=tokens())
    model = vescale.parallelize(plan, build(name))
    with explain(model) as explanation:
        model(input_ids=tokens()["input_ids"], labels=tokens()["input_ids"])
    return str(explanation)


@pytest.mark.by_day("table-table read as Shard(1)")
@pytest.mark.parametrize(
    ("name", "said"),
    [("bloom", "alibi read as Shard(0) of each row"), ("table", "table read as Shard(1)")],
)
def test_explain_says_what_is_read_in_parts(world2: World, name: str, said: str) -> None:
    assert said in world2.run(explained, name)[0]


@pytest.mark.by_day("table")
@pytest.mark.parametrize("name", ["bloom", "table"])
def test_what_their_layers_return_is_verified(name: str) -> None:
    batch = tokens() | {"labels": tokens()["input_ids"]}
    report = vescale.verify(make_plan({TP: 2}), lambda: build(name), batch, steps=1)
    assert report.passed, str(report)


def test_a_large_model_reads_them_in_every_block() -> None:
    config = BloomConfig(hidden_size=4096, n_layer=30, n_head=32)
    model = vescale.deferred_init(AutoModelForCausalLM.from_config, config)
    said = tensor_parallel_plan(model, "auto", 8)
    assert SAID["bloom"].items() <= said.items()
    assert said["transformer.h.*.self_attention.query_key_value.weight"] == "Shard(0)"


def with_padding(constraints: Constraints | None, *rows: int) -> list[Tensor]:
    """Return logits of batches of other numbers of rows, of which one ends with padding."""
    model: Any = build("bloom").eval()
    if constraints is not None:
        plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=tokens())
        model = vescale.parallelize(plan, model)
    found: list[Tensor] = []
    for num_rows in rows:
        ids = torch.arange(6 * num_rows).view(num_rows, 6) % VOCABULARY
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        with torch.no_grad():
            found.append(whole(model(input_ids=ids, attention_mask=mask).logits))
    return found


def test_batches_have_any_number_of_rows(world2: World) -> None:
    expected = with_padding(None, 1, 3, 4)
    for found in world2.run(with_padding, {TP: 2}, 1, 3, 4):
        for each, alone in zip(found, expected, strict=True):
            # Sums over ranks are in another order.
            torch.testing.assert_close(each, alone, rtol=0, atol=1e-12)


def generated(constraints: Constraints | None) -> Tensor:
    model: Any = build("bloom").eval()
    if constraints is not None:
        plan = vescale.generate_plan(model, constraints, world_size=2, example_batch=tokens())
        model = vescale.parallelize(plan, model)
    return model.generate(tokens()["input_ids"], max_new_tokens=6, do_sample=False)


@pytest.mark.nightly
def test_models_with_them_generate(world2: World) -> None:
    expected = generated(None)
    assert all(torch.equal(each, expected) for each in world2.run(generated, {TP: 2}))


def manual(text: str, mark: str = "<slice:bias>", *, has_example: bool = True) -> None:
    model = build("argument")
    texts = {
        "blocks.*.attn.qkv.weight": "InterleavedShard(0, 3)",
        "blocks.*.attn.out.weight": "Shard(1)",
        "blocks.*.attn.<attr:num_heads>": "Shard(0)",
        f"blocks.*.attn.{mark}": text,
    }
    given = {TP: 2, f"{TENSOR}.sharding_policy": "manual", f"{TENSOR}.sharding_plan": texts}
    plan = vescale.generate_plan(model, given, world_size=2, example_batch=tokens())
    model = vescale.parallelize(plan, model)
    ids = tokens()["input_ids"]
    model(ids, ids)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (("Shard(0)",), "needs an example to compare it"),
        (("Replicate()",), r"expected 'Shard\(d\)' or 'Shard\(d\) of each row'"),
        (("Shard(0)", "<slice:biases>"), "is for an argument of 'blocks.0.attn', of"),
    ],
)
def test_slices_by_hand_that_nothing_shows_to_be_right_are_refused(
    world2: World, said: tuple[str, ...], message: str
) -> None:
    check_refusal(world2, ValueError, message, partial(manual, *said))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slopes", "argument"])
def test_chunks_have_the_bits_of_any_number_of_ranks(name: str) -> None:
    def built() -> nn.Module:
        return build(name).float()

    said = invariant_bits.said_of(built(), 2, sequence=False)
    assert said["blocks.*.attn.qkv.weight"] == "InterleavedShard(0, 3)"
    invariant_bits.compare_sizes(built, said, 2, sequence=False, sizes=[2])
