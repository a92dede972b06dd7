"""Blocks of which a part runs again in backward: the bits of blocks that keep all, counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)

import vescale
from vescale_parallel import ParallelPlan
from vescale_testing import World

from .families import make
from .plans import DP, EP, PARTS, PP, SEQUENCE, TP, ZERO, Constraints, make_plan
from .test_bad_input import check as refused
from .training import whole

RECOMPUTE, KEEP = "recompute", "recompute_keep"
MODES: tuple[Constraints, ...] = ({}, {RECOMPUTE: "selective"}, {RECOMPUTE: "full"})
FAMILY_BLOCKS = {"gpt2": "transformer.h.*", "llama": "model.layers.*"}

Found = tuple[Tensor, dict[str, Tensor]]


def dropping(family: str, autocast: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model with dropout, in float32 for autocast, which leaves float64 alone.

    It keeps no cache, as plans that recompute have it: a cache copies keys, and products of two
    layouts of the same numbers differ in the last bit on some processors.
    """
    made: tuple[Any, dict[str, Tensor]] = make(family)
    model, call = made
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    return model.float() if autocast else model, call


def gradients(family: str, constraints: Constraints, autocast: bool) -> Found:
    """Return loss and gradients of one backward pass of a model with dropout."""
    torch.manual_seed(0)
    model, call = dropping(family, autocast)
    plan = make_plan(constraints)
    model = vescale.parallelize(plan, model.train())
    parts = plan.data_parallel.size
    part = dist.get_rank() // plan.tensor_parallel.size % parts
    rows = {name: x.chunk(parts)[part] for name, x in call.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**rows).loss
    loss.backward()
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def gradients_of_modes(
    family: str, constraints: Constraints, modes: tuple[Constraints, ...], autocast: bool
) -> list[Found]:
    return [gradients(family, {**constraints, **mode}, autocast) for mode in modes]


PLANS: dict[str, Constraints] = {
    "dp": {DP: 2},
    "zero3": {DP: 2, ZERO: 3},
    "tp": {TP: 2},
    "tp-sequence": {TP: 2, SEQUENCE: True},
    "pp": {PP: 2, PARTS: 2},
}
IN_CI = {("gpt2", "zero3", False), ("llama", "tp", False), ("gpt2", "pp", True)}
CASES = [
    pytest.param(*case, marks=[] if case in IN_CI else [pytest.mark.nightly])
    for case in ((f, p, a) for f in FAMILY_BLOCKS for p in PLANS for a in (False, True))
]


def same_bits(founds: list[Found]) -> None:
    (loss, grads), *others = founds
    assert grads
    for other, grads_again in others:
        assert torch.equal(other, loss)
        assert grads_again.keys() == grads.keys()
        for name, grad in grads.items():
            assert torch.equal(grads_again[name], grad), name


@pytest.mark.by_day("gpt2-zero3-False")
@pytest.mark.parametrize(("family", "plan", "autocast"), CASES)
def test_what_is_kept_changes_no_bit(
    world2: World, family: str, plan: str, autocast: bool
) -> None:
    some = {RECOMPUTE: {FAMILY_BLOCKS[family].replace("*", "0"): "selective"}}
    modes = *MODES, some
    for founds in world2.run(gradients_of_modes, family, PLANS[plan], modes, autocast):
        same_bits(founds)


@pytest.mark.parametrize("autocast", [False, True])
def test_one_rank_has_the_bits_of_torch_alone(world1: World, autocast: bool) -> None:
    founds = world1.run(gradients_of_modes, "gpt2", {}, MODES, autocast)[0]
    torch.manual_seed(0)
    model, call = dropping("gpt2", autocast)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model.train()(**call).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    same_bits([(loss.detach(), grads), *founds])


@pytest.mark.nightly
def test_experts_on_other_ranks_are_run_again_in_part(world2: World) -> None:
    for founds in world2.run(gradients_of_modes, "mixtral", {DP: 2, EP: 2}, MODES, False):
        same_bits(founds)


# --- Counted.


class Counts(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.of[name] = self.of.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x_BSF: Tensor) -> Tensor:
        qkv = self.qkv(self.norm(x_BSF)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x_BSF = x_BSF + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = nn.functional.gelu(self.up(self.norm(x_BSF)))
        return x_BSF + self.down(hidden.square() @ hidden.new_ones(64, 64).expand(2, 64, 64))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x_BSF: Tensor) -> Tensor:
        for block in self.blocks:
            x_BSF = block(x_BSF)
        return x_BSF.square().mean()


class Made(TorchDispatchMode):
    """Notes the memory of what operators return."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, list | tuple) else [out]:
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._made[StorageWeakRef(storage)] = storage.nbytes()
        return out

    @property
    def living_bytes(self) -> int:
        """Bytes of what somebody still has."""
        return sum(nbytes for made, nbytes in self._made.items() if not made.expired())


def counted(constraints: Mapping[str, Any]) -> tuple[dict[str, int], int]:
    """Return the operators of a backward pass, and the bytes kept for it."""
    torch.manual_seed(0)
    model = vescale.parallelize(make_plan(constraints), Net())
    x_BSF = torch.randn(2, 8, 16)
    model(x_BSF).backward()
    with Made() as made:
        loss = model(x_BSF)
    kept = made.living_bytes
    with Counts() as counts:
        loss.backward()
    return counts.of, kept


def test_no_product_or_attention_is_computed_again(world1: World) -> None:
    def of(**constraints: Any) -> tuple[dict[str, int], int]:
        return world1.run(counted, constraints)[0]

    none, all_kept = of()
    full, least = of(recompute="full")
    selective, some_kept = of(recompute="selective")
    keeping, more_kept = of(
        recompute="selective", recompute_keep=("aten.bmm", "aten.gelu.default")
    )
    mixed, _ = of(recompute={"blocks.0": "full", "blocks.1": "selective"})

    products = ("mm", "addmm", "_scaled_dot_product_flash_attention_for_cpu")
    for product in products:
        assert selective.get(product, 0) == none.get(product, 0)
    # qkv, out and up; of the last product of a block nothing is needed.
    assert full["addmm"] == none.get("addmm", 0) + 2 * 3
    assert mixed["addmm"] == none.get("addmm", 0) + 3
    assert selective["native_layer_norm"] == full["native_layer_norm"] == 2 * 2
    assert "native_layer_norm" not in none
    assert selective["gelu"] == 2
    assert "gelu" not in keeping
    assert selective["bmm"] == full["bmm"] == none["bmm"] + 2
    assert keeping["bmm"] == none["bmm"]
    assert least < some_kept < more_kept < all_kept


# --- Plans.


def test_plans_of_before_load_and_patterns_are_written_and_read() -> None:
    old = ParallelPlan.from_json('{"recompute": "full"}')
    assert old.recompute == "full"
    plan = ParallelPlan(
        recompute={"blocks.0": "full", "blocks.1": "selective"}, recompute_keep=("aten.bmm",)
    )
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert hash(plan) == hash(ParallelPlan.from_json(plan.to_json()))
    assert "(selective checkpointing)" in str(plan)
    assert plan.dotted()[RECOMPUTE] == {"blocks.0": "full", "blocks.1": "selective"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({RECOMPUTE: "op"}, r"one of \['none', 'full', 'selective'\], or patterns .* got 'op'"),
        ({RECOMPUTE: {"blocks.*": True}}, r"of each pattern of blocks, got {'blocks.\*': True}"),
        ({KEEP: ("aten.bmm",)}, "recompute 'selective': expected recompute to say so"),
        ({RECOMPUTE: "selective", KEEP: "aten.bmm"}, "expected .* a list of operators"),
        ({RECOMPUTE: "selective", "compile": "blocks"}, "tells operators apart"),
    ],
)
def test_what_cannot_be_is_refused_when_a_plan_is_made(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelPlan(**fields)


def parallelized(constraints: Constraints) -> None:
    vescale.parallelize(make_plan(constraints), Net())


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({RECOMPUTE: {"layers.*": "full"}}, "recompute: 'layers.*' is no block of the model"),
        (
            {RECOMPUTE: {"blocks.*": "full", "blocks.1": "none"}},
            "recompute says both full and none of 'blocks.1'; leave one out",
        ),
        ({RECOMPUTE: "selective", KEEP: ("aten.bmmm",)}, "torch has no operator 'aten.bmmm'"),
        ({RECOMPUTE: "selective", KEEP: ("aten.add_",)}, "'aten.add_' writes to its arguments"),
    ],
)
def test_what_the_model_or_torch_does_not_have_is_refused(
    world1: World, constraints: Constraints, message: str
) -> None:
    refused(world1, ValueError, message, parallelized, constraints)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def write_to_what_is_kept() -> None:
    model = vescale.parallelize(make_plan({RECOMPUTE: "selective"}), Writes())
    model(torch.ones(2, 4)).backward()


def test_a_block_that_writes_to_what_is_kept_is_named(world1: World) -> None:
    message = "'blocks.1' writes in place to the result of an operator"
    refused(world1, ValueError, message, write_to_what_is_kept)
