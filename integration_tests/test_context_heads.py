"""Under context parallelism the head and the loss run on slices, and are those of one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701 (documented)

import vescale
from vescale_testing import World

from .context_heads import GATHERED, ON_SLICES, build_habit, train_habit
from .contexts import VOCABULARY, ByHand, batch_of, build
from .experts import Trained
from .families import InDouble
from .plans import CP, DP, PARTS, PP, TP, ZERO, Constraints, make_plan
from .test_context_evaluation import check
from .test_expert_parallel import compare
from .training import whole

FEATURES = 32  # of weights, whose size is another
METHOD, OUTPUTS = "context_parallel.method", "context_parallel.outputs"


@cache
def on_one_device(habit: str) -> Trained:
    return train_habit(habit, None)


_DAILY = ("z_loss", "chunks")


@pytest.mark.slow
@pytest.mark.parametrize(
    "habit",
    [
        pytest.param(habit, marks=() if habit in _DAILY else pytest.mark.nightly)
        for habit in (*ON_SLICES, *GATHERED)
    ],
)
def test_losses_of_any_habit_are_those_of_one_device(world2: World, habit: str) -> None:
    method = "ring" if habit in ("tied", "z_loss", "chunks") else "all_to_all"
    compare(world2.run(train_habit, habit, {CP: 2, METHOD: method}), on_one_device(habit))


def on_rank_positions(habit: str) -> list[int]:
    """Return of how many positions the largest tensor over the vocabulary is, in every rank."""
    model: Any = vescale.parallelize(make_plan({CP: 2}), build_habit(habit))
    batch, seen = batch_of(0, 12, "", rows=3), _Largest()
    with InDouble():
        model(**batch)  # which is compared with one device
        with seen:
            output = model(**batch)
            loss = output["loss"] if isinstance(output, dict) else output[0]
            loss.backward()
    return [seen.numel // VOCABULARY // len(batch["labels"])]


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor) and VOCABULARY in x.shape and FEATURES not in x.shape:
                self.numel = max(self.numel, x.numel())
        return made


@pytest.mark.nightly
def test_logits_are_slices(world2: World) -> None:
    for habit in ON_SLICES[:-1]:  # soft targets are themselves as large
        found = world2.run(on_rank_positions, habit)
        assert found == [[6], [6]], habit


def on_rank_peak(constraints: Constraints) -> int:
    """Return the most memory of a step of a model whose logits are nearly all of it."""
    torch.manual_seed(0)
    model: Any = ByHand()
    model.embed, model.head = nn.Embedding(2048, 32), nn.Linear(32, 2048)
    model = model.double()
    if constraints:
        model = vescale.parallelize(make_plan(constraints), model)
    batch = batch_of(0, 256, "", rows=2)
    model(**batch).backward()  # which is compared with one device
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model(**batch).backward()
    total = most = 0
    results: Any = seen.profiler
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most


@pytest.mark.nightly
def test_memory_of_logits_falls_with_the_number_of_ranks(world4: World, world2: World) -> None:
    alone = on_rank_peak({})
    assert max(world2.run(on_rank_peak, {CP: 2})) < 0.55 * alone
    assert max(world4.run(on_rank_peak, {CP: 4})) < 0.32 * alone
    assert min(world2.run(on_rank_peak, {CP: 2, OUTPUTS: "whole"})) > 0.9 * alone


def on_rank_of_family(family: str, constraints: Constraints, habit: str) -> dict[str, Any]:
    """Return the loss, gradients, and positions of the largest logits of a step."""
    model: Any = build(family)
    if constraints:
        model = vescale.parallelize(make_plan(constraints), model)
    batch, seen = batch_of(0, 12, "", rows=3), _Largest()
    if habit == "num_items_in_batch":
        batch["num_items_in_batch"] = torch.tensor(29)
    if habit == "logits_to_keep":
        batch |= {"logits_to_keep": 5, "labels": batch["labels"][:, -5:]}
    with InDouble():
        model(**batch)
        with seen:
            loss = model(**batch).loss
            loss.backward()
    grads = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    positions = seen.numel // VOCABULARY // len(batch["labels"])
    return {"loss": loss.detach(), **grads, "positions": positions}


_HABITS = ("", "num_items_in_batch", "logits_to_keep")


@pytest.mark.by_day("llama-num_items_in_batch", "llama-logits_to_keep")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "habit"),
    [
        pytest.param(family, habit, marks=() if family == "llama" else pytest.mark.nightly)
        for family in ("llama", "qwen3", "gemma3_text", "gpt2", "bert")
        for habit in (_HABITS if family != "bert" else _HABITS[:1])
    ],
)
def test_logits_of_transformers_are_slices(world2: World, family: str, habit: str) -> None:
    expected = on_rank_of_family(family, {}, habit)
    assert expected.pop("positions") == (5 if habit == "logits_to_keep" else 12)
    for found in world2.run(on_rank_of_family, family, {CP: 2}, habit):
        # Five positions are fewer numbers than what leaves the blocks, and returned whole.
        assert found.pop("positions") == (5 if habit == "logits_to_keep" else 6)
        check(found, expected)


def on_rank_outputs(constraints: Constraints) -> list[Any]:
    """Return what calls of a model have in the place of logits."""
    model: Any = vescale.parallelize(make_plan(constraints), build("llama"))
    batch, found = batch_of(0, 13, ""), list[Any]()
    with InDouble():
        logits = model(**batch).logits
        try:
            found.append(logits.detach())
        except ValueError as error:
            found.append(str(error))
        with torch.no_grad():
            found.append(model(**batch).logits)
        found.append(model(input_ids=batch["input_ids"]).logits.detach())
        states = model(**batch, output_hidden_states=True).hidden_states
        kept, own = list[Tensor](), model.loss_function
        model.lm_head.register_forward_hook(lambda _, args, made: found.append(made.detach()))
        model.loss_function = lambda **given: (kept.append(given["logits"]), own(**given))[1]
        model(**batch)
    if constraints.get(OUTPUTS) == "loss":
        with pytest.raises(ValueError, match=r"kept beyond the call .* to_local\(\)"):
            kept[-1].mean()
    return [*found, *(x.detach() for x in states)]


@pytest.mark.slow
def test_logits_are_whole_where_they_are_returned(world2: World) -> None:
    model, batch = build("llama"), batch_of(0, 13, "")
    with torch.no_grad(), InDouble():
        expected = model(**batch, output_hidden_states=True)
    for outputs in ("loss", "whole"):
        for found in world2.run(on_rank_outputs, {CP: 2, OUTPUTS: outputs}):
            if outputs == "loss":
                assert "'logits'" in found[0]
                assert "context_parallel.outputs" in found[0]
                found[0] = expected.logits
            wanted = [expected.logits] * 4 + [*expected.hidden_states]
            for x, y in zip(found, wanted, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-12 * float(y.abs().max()))


@pytest.mark.by_day("plan1")
@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [{CP: 2, DP: 2, ZERO: 3}, {CP: 2, TP: 2}, {CP: 4, METHOD: "ring"}]
)
def test_heads_on_slices_go_with_other_axes(world4: World, plan: Constraints) -> None:
    for habit in ("z_loss", "in_place"):
        compare(world4.run(train_habit, habit, plan), on_one_device(habit))


def on_rank_of_stage(plan: Constraints) -> int:
    """Return of how many positions the largest tensor over the vocabulary is on this rank."""
    model: Any = vescale.parallelize(make_plan(plan), build("llama", tie_word_embeddings=False))
    batch, seen = batch_of(0, 12, "", rows=2), _Largest()
    with InDouble():
        model(**batch).loss.backward()
        with seen:
            model(**batch).loss.backward()
    return seen.numel // VOCABULARY


@pytest.mark.nightly
def test_logits_of_the_last_stage_are_slices(world4: World) -> None:
    # Two micro-batches of one row.
    found = sorted(world4.run(on_rank_of_stage, {CP: 2, PP: 2, PARTS: 2}))
    assert found[2:] == [6, 6]
    # Two micro-batches of one row without stages.
    plan = {CP: 4, "batch.gradient_accumulation": 2}
    assert world4.run(on_rank_of_stage, plan) == [3, 3, 3, 3]


def hooked(constraints: Constraints | None, places: tuple[str, ...]) -> list[Tensor] | str:
    """Return the gradients of a step whose backward hooks halve some, or why there are none."""
    torch.manual_seed(0)
    model: Any = ByHand().double()
    if constraints is not None:
        model = vescale.parallelize(make_plan(constraints), model)
    for place in places:
        model.get_submodule(place).register_full_backward_hook(
            lambda module, given, made: tuple(None if x is None else x / 2 for x in given)
        )
    try:
        model(**batch_of(0, 12, "")).backward()
    except RuntimeError as error:
        return str(error)
    return [whole(p.grad).clone() for p in model.parameters()]


@pytest.mark.slow
def test_backward_hooks_behind_blocks_need_the_whole(world2: World) -> None:
    for places in (("blocks.0", "blocks.1"), ("blocks.2", "head")):
        whole_there = {OUTPUTS: "whole"} if "head" in places else {}
        expected = hooked(None, places)
        for grads in world2.run(hooked, {CP: 2, **whole_there}, places):
            # Rounding of float64 in another order.
            torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)
    for said in world2.run(hooked, {CP: 2}, ("head",)):
        assert isinstance(said, str)
        assert "full backward hook" in said
