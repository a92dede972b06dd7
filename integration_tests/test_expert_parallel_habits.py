"""What people do with models whose experts ranks share: save, evaluate, generate, recompute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_dtensor import CommCounter
from vescale_parallel import expert_load
from vescale_testing import World

from .experts import ROWS, AllInDouble, adamw, build, rows_of, tokens
from .plans import DP, EP, ZERO, Constraints, make_plan
from .test_bad_input import check
from .training import whole

BF16: Constraints = {"precision.param": "bfloat16", "precision.reduce": "float32"}


def step(model: Any, optimizer: Any, number: int) -> float:
    with AllInDouble():
        loss = model(**rows_of(model, tokens(number))).loss
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def start(constraints: Constraints, family: str = "qwen3_moe") -> tuple[Any, Any]:
    return vescale.parallelize(make_plan(constraints), build(family, "batched_mm"), adamw)


def save_and_go_on(path: str, constraints: Constraints) -> float:
    model, optimizer = start(constraints)
    step(model, optimizer, 0)
    vescale.save(path, {"model": model, "optimizer": optimizer})
    return step(model, optimizer, 1)


def load_and_go_on(path: str, constraints: Constraints) -> float:
    model, optimizer = start(constraints)
    vescale.load(path, {"model": model, "optimizer": optimizer})
    return step(model, optimizer, 1)


@pytest.mark.slow
def test_checkpoints_fit_any_number_of_ranks_that_share_experts(
    world2: World, world4: World, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    expected = world4.run(save_and_go_on, path, {DP: 4, EP: 2, ZERO: 3})[0]
    for world, plan in (
        (world4, {DP: 4, EP: 4}),
        (world2, {DP: 2, EP: 2, ZERO: 1}),
        (world2, {DP: 2, ZERO: 2}),
    ):
        assert world.run(load_and_go_on, path, plan) == pytest.approx(
            [expected] * plan[DP], rel=1e-12, abs=0
        )


def exported(path: str, constraints: Constraints) -> None:
    model, _ = start(constraints)
    vescale.export(model, path)


@pytest.mark.slow
def test_transformers_loads_what_ranks_that_share_experts_exported(
    world2: World, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    world2.run(exported, str(tmp_path), {DP: 2, EP: 2})
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    for name, tensor in build("qwen3_moe").state_dict().items():
        assert torch.equal(found[name], tensor), name


def evaluated(constraints: Constraints | None) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return logits, chosen experts of every layer and what is generated, of all rows."""
    model: Any = build("qwen3_moe", "batched_mm")
    chosen = list[Tensor]()
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _m, _i, out: chosen.append(out[-1]))
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
    model.eval()
    ids = rows_of(model, tokens(0))["input_ids"]
    with AllInDouble(), torch.no_grad():
        logits = model(input_ids=ids).logits
        experts = [*chosen]
        made = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    return logits, experts, made


@pytest.mark.slow
def test_rows_are_routed_evaluated_and_generated_as_on_one_device(world2: World) -> None:
    logits, experts, made = evaluated(None)
    ranks = world2.run(evaluated, {DP: 2, EP: 2})
    # Products of float64 over other numbers of rows.
    torch.testing.assert_close(torch.cat([r[0] for r in ranks]), logits, rtol=1e-12, atol=1e-12)
    for layer, expected in enumerate(experts):
        assert torch.equal(torch.cat([r[1][layer] for r in ranks]), expected)
    assert torch.equal(torch.cat([r[2] for r in ranks]), made)


def losses(constraints: Constraints, dtype: torch.dtype) -> list[float]:
    # The kernel wants rows of a multiple of 16 bytes.
    model: Any = build("qwen3_moe", "grouped_mm", moe_intermediate_size=16).to(dtype)
    model, optimizer = vescale.parallelize(make_plan(constraints), model, adamw)
    made = list[float]()
    for number in range(3):
        loss = model(**rows_of(model, tokens(number))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append(loss.item())
    return made


@pytest.mark.nightly
@pytest.mark.slow
def test_grouped_products_train_in_float32_and_bfloat16(world2: World) -> None:
    whole = world2.run(losses, {DP: 2}, torch.float32)[0]
    shared = world2.run(losses, {DP: 2, EP: 2}, torch.float32)
    # Rounding of float32 sums in another order, over three steps of AdamW.
    assert shared == [pytest.approx(whole, rel=1e-4)] * 2
    low = world2.run(losses, {DP: 2, EP: 2, ZERO: 3, **BF16}, torch.float32)
    # Parameters in 8 bits of mantissa.
    assert low == [pytest.approx(whole, rel=5e-2)] * 2


def recomputed(constraints: Constraints) -> list[Tensor]:
    model, _ = start(constraints, "mixtral")
    model(**rows_of(model, tokens(0))).loss.backward()
    return [whole(p.grad) for p in model.parameters()]


@pytest.mark.slow
def test_recomputed_blocks_send_their_tokens_again(world2: World) -> None:
    plan: Constraints = {DP: 2, EP: 2, ZERO: 2}
    expected = world2.run(recomputed, plan)[0]
    for grads in world2.run(recomputed, {**plan, "recompute": "full"}):
        assert all(map(torch.equal, grads, expected))


def sent() -> tuple[int, int, int, int]:
    """Return all-to-alls of a forward, their bytes, pairs that were sent, and all of backward."""
    model, _ = start({DP: 2, EP: 2}, "mixtral")
    away = [0]

    def count(_m: Any, _i: Any, out: Any) -> None:
        mine = vescale.data_parallel_rank(model)
        away[0] += int((out[-1] // 2 != mine).sum())

    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(count)
    batch = rows_of(model, tokens(0))
    with AllInDouble():
        model(**batch)  # a first call compares inputs, and looks for coupled rows
        away[0] = 0
        with CommCounter() as counter:
            loss = model(**batch).loss
        forward = counter.by_kind["all_to_all"]
        with CommCounter() as counter:
            loss.backward()
    return forward.num_collectives, forward.nbytes, away[0], counter.num_collectives


@pytest.mark.slow
def test_a_token_is_sent_once_an_expert_of_other_ranks_and_back(world2: World) -> None:
    made = world2.run(sent)
    of_pair, of_counts = 16 * 8, 4 // 2 * 8  # hidden numbers in float64; a count an expert
    layers = 2
    total = sum(pairs for _, _, pairs, _ in made)
    for collectives, nbytes, _, _ in made:
        assert collectives == 3 * layers
        # There what is of this rank's tokens, and back what is of others'.
        assert nbytes == total * of_pair + layers * of_counts


def loads(constraints: Constraints, steps: int) -> tuple[list[list[int]], Tensor]:
    """Return the load of each step, and what the routers of this rank chose before it."""
    model, optimizer = start(constraints, "mixtral")
    chosen, told, own = list[Tensor](), list[list[int]](), list[Tensor]()
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _m, _i, out: chosen.append(out[-1]))
    for number in range(steps):
        batch = rows_of(model, tokens(number))
        with torch.no_grad():
            model(**batch)  # also checks inputs, in forwards of its own
            chosen.clear()
            model(**batch)  # evaluation counts nothing
            own.append(torch.cat([each.flatten().bincount(minlength=4) for each in chosen]))
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append([count for of in expert_load(model).values() for count in of.tolist()])
    return told, torch.stack(own)


@pytest.mark.by_day("more0")
@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"recompute": "full", ZERO: 2}])
def test_the_load_is_that_of_all_ranks_in_the_last_step(world2: World, more: Constraints) -> None:
    first, second = world2.run(loads, {DP: 2, EP: 2, **more}, 2)
    both = first[1] + second[1]
    assert first[0] == second[0] == both.tolist()
    assert both.sum() == 2 * 2 * 2 * ROWS * 6  # steps, layers, experts of each token


class Stack(nn.Module):
    """Experts written by hand: (rows, experts, weights), in any names."""

    def __init__(self, experts: int, power: int = 1) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 8, 12))
        self.down = nn.Parameter(torch.randn(experts, 12, 8))
        self.power = power

    def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        x_BTKH = torch.einsum("...h,...khf->...kf", x, self.up[chosen]).tanh()
        x_BTKH = torch.einsum("...kf,...kfh->...kh", x_BTKH, self.down[chosen])
        return (x_BTKH * gates[..., None] ** self.power).sum(-2)


class Dense(nn.Module):
    """Experts that are given a weight of each expert, as transformers 4 has those of GPT-OSS."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 8, 12))
        self.bias = nn.Parameter(torch.randn(experts, 12))
        self.down = nn.Parameter(torch.randn(experts, 12, 8))

    def forward(self, x: Tensor, chosen: Any = None, gates: Any = None) -> Tensor:
        rows, made = x.reshape(-1, x.shape[-1]), torch.zeros(x.shape[:-1].numel(), x.shape[-1])
        for expert in range(gates.shape[1]):
            token = (chosen == expert).any(1).nonzero()[:, 0]
            if len(token):
                hidden = (rows[token] @ self.up[expert] + self.bias[expert]).tanh()
                weighted = hidden @ self.down[expert] * gates[token, expert, None]
                made = made.to(x.dtype).index_add(0, token, weighted)
        return made.view(len(x), -1, x.shape[-1])


class RoutedToAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(8, 4), Dense()
        self.folds = False

    def forward(self, x: Tensor) -> Tensor:
        scores_TE = self.router(x).flatten(0, -2)
        gates, chosen = scores_TE.topk(2)
        gates_TE = torch.zeros_like(scores_TE).scatter(1, chosen, gates.softmax(-1))
        x = x.flatten(0, 1) if self.folds else x
        return self.experts(x, chosen, gates=gates_TE).pow(2).mean()


class Routed(nn.Module):
    """A router and experts; ``offset`` is added to what the router chose."""

    def __init__(self, experts: int = 4, power: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(8, experts), Stack(experts, power)
        self.offset = 0

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).topk(2)
        return self.experts(x, chosen + self.offset, gates=gates).pow(2).mean()


def by_hand(kind: type[nn.Module], constraints: Constraints | None, rows: Tensor) -> list[Tensor]:
    model: Any = kind().double()
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
        rows = rows.chunk(2)[vescale.data_parallel_rank(model)]
    model(rows).backward()
    return [whole(p.grad) for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Routed, RoutedToAll])
def test_experts_that_are_written_by_hand_are_shared(world2: World, kind: type[nn.Module]) -> None:
    rows = torch.randn(4, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = by_hand(kind, None, rows)
    for grads in world2.run(by_hand, kind, {DP: 2, EP: 2}, rows):
        for grad, one in zip(grads, expected, strict=True):
            # Sums of float64 over tokens of two ranks, in another order.
            torch.testing.assert_close(grad, one, rtol=1e-11, atol=1e-13)


def refused(size: dict[str, int]) -> None:
    offset = size.pop("offset", 0)
    model: Any = vescale.parallelize(make_plan({DP: 2, EP: 2}), Routed(**size))
    model(torch.randn(ROWS, 8))  # looks for coupled rows, on one device
    model.offset = offset
    model(torch.randn(ROWS, 8))


def refused_folded() -> None:
    model: Any = vescale.parallelize(make_plan({DP: 2, EP: 2}), RoutedToAll())
    model(torch.randn(ROWS, 3, 8))
    model.folds = True
    model(torch.randn(ROWS, 3, 8))


def test_rows_of_another_shape_than_seen_are_refused(world2: World) -> None:
    message = r"expected rows \(batch, tokens, hidden\) .*'experts' takes them"
    check(world2, ValueError, message, refused_folded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            {"experts": 5},
            r"does not divide the 5 experts of 'experts'; use one of \[1, 5\]",
        ),
        ({"power": 2}, r"'experts' stacks experts, .*not the sum of what each expert makes"),
        ({"offset": 1}, r"'experts' was called with experts from \d to 4, and has 0 to 3"),
    ],
    ids=lambda each: "" if isinstance(each, str) else next(iter(each)),
)
def test_experts_that_ranks_cannot_share_are_refused(
    world2: World, size: dict[str, int], message: str
) -> None:
    check(world2, ValueError, message, refused, size)


class Balanced(nn.Module):
    """Keeps a balancing loss in an attribute, which is one of all rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts = nn.Linear(8, 4), Stack(4)
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 8)
        scores = self.router(flat).softmax(-1)
        gates, chosen = scores.topk(2)
        load = nn.functional.one_hot(chosen, 4).to(x.dtype).mean((0, 1))
        self.loss = 4 * (load * scores.mean(0)).sum()
        return self.experts(flat, chosen, gates).view_as(x)


class SumOfBalanced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Balanced() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        losses: list[Any] = [block.loss for block in self.blocks]
        return x.square().mean() + torch.stack(losses).sum()


def balanced(constraints: Constraints | None, rows: Tensor) -> list[Tensor]:
    model: Any = SumOfBalanced().double()
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
        rows = rows.chunk(len(rows) // 2)[vescale.data_parallel_rank(model)]
    loss = model(rows)
    loss.backward()
    return [loss.detach(), *(whole(p.grad).clone() for p in model.parameters())]


@pytest.mark.by_day("plan2")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [{EP: 2}, {EP: 4, ZERO: 2}, {EP: 2, ZERO: 3}])
def test_stacked_experts_get_each_row_once_where_a_block_keeps_a_loss_of_all_rows(
    world4: World, plan: Constraints
) -> None:
    rows = torch.randn(8, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = balanced(None, rows)
    for made in world4.run(balanced, {DP: 4, **plan}, rows):
        for value, one in zip(made, expected, strict=True):
            # Sums of float64 over tokens of four ranks, in another order.
            torch.testing.assert_close(value, one, rtol=1e-11, atol=1e-13)
