"""Every schedule of a pipeline: the bits of one device that accumulates the same micro-batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import vescale
from vescale_testing import World

from .models import HandWritten, batches
from .plans import DP, PARTS, PP, SCHEDULE, TP, VIRTUAL, ZERO, Constraints, make_plan
from .training import whole

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zero_bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}


def model_of(name: str, depth: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    if name == "hand_written":
        return HandWritten(depth=depth).to(dtype)
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "llama": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": depth,
            "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40,
        },
        "gpt2": {
            "n_embd": 16, "n_layer": depth, "n_head": 2, "vocab_size": 40, "n_positions": 16,
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        },
    }[name]  # fmt: skip
    config = AutoConfig.for_model(name, **sizes)
    return Loss(AutoModelForCausalLM.from_config(config)).to(dtype)


class Loss(nn.Module):
    """The loss of a causal language model, in the dtype of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def constraints_of(schedule: str, size: int, microbatches: int) -> Constraints:
    virtual = SCHEDULES[schedule]
    return {PP: size, PARTS: microbatches, SCHEDULE: schedule, VIRTUAL: virtual}


def accumulated(model: nn.Module, microbatches: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Two steps on one device, one micro-batch after the other."""
    losses: list[Tensor] = []
    for batch in batches(2, rows=8, length=6):
        parts = [
            dict(zip(batch, tensors, strict=True))
            for tensors in zip(*(x.chunk(microbatches) for x in batch.values()), strict=True)
        ]
        found: list[Tensor] = []
        model.zero_grad()
        for part in parts:
            loss = model(part)
            (loss / microbatches).backward()
            found.append(loss.detach())
        losses.append(torch.stack(found).double().mean().to(found[0].dtype))
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compared(
    name: str,
    constraints: Constraints,
    dtype: torch.dtype,
    change: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """Two steps of a pipeline, compared with one device; both models are changed first."""
    plan = make_plan(constraints)
    pipeline = plan.pipeline_parallel
    alone, given = (model_of(name, pipeline.num_stages, dtype) for _ in range(2))
    change(alone)
    change(given)
    losses, grads = accumulated(alone, pipeline.microbatches)
    model, _ = vescale.parallelize(plan, given, lambda m: SGD(m.parameters(), lr=0.1))
    for batch, expected in zip(batches(2, rows=8, length=6), losses, strict=True):
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        assert torch.equal(loss.detach(), expected), (loss, expected)
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None, fqn
        # A tied weight is summed over micro-batches on each of its two stages first.
        if "wte" in fqn:
            torch.testing.assert_close(whole(parameter.grad), grads[fqn], rtol=1e-12, atol=1e-15)
        else:
            assert torch.equal(whole(parameter.grad), grads[fqn]), fqn


def _check(world: World, name: str, schedule: str, size: int, microbatches: int) -> None:
    # The tied weight's sums are in another order; float64 tells that from an error.
    dtype = torch.float64 if name == "gpt2" else torch.float32
    world.run(compared, name, constraints_of(schedule, size, microbatches), dtype)


class Gpt2(nn.Module):
    """GPT-2, tied or with a copy of its embedding as head, in float32 from the logits on."""

    def __init__(self, depth: int, dtype: torch.dtype, *, is_tied: bool) -> None:
        super().__init__()
        loss: Any = model_of("gpt2", depth, dtype)
        self.model = loss.model
        if not is_tied:
            self.model.lm_head.weight = nn.Parameter(self.model.lm_head.weight.detach().clone())

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def tied(size: int, microbatches: int, dtype: torch.dtype) -> None:
    """A tied weight under a pipeline, beside one device and one whose weights are not tied."""
    constraints = constraints_of("1f1b", size, microbatches)
    losses, grads = accumulated(Gpt2(size, dtype, is_tied=True), microbatches)
    _, apart = accumulated(Gpt2(size, dtype, is_tied=False), microbatches)
    model, _ = vescale.parallelize(
        make_plan(constraints),
        Gpt2(size, dtype, is_tied=True),
        lambda m: SGD(m.parameters(), lr=0.1),
    )
    for batch, expected in zip(batches(2, rows=8, length=6), losses, strict=True):
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        assert torch.equal(loss.detach(), expected), (loss, expected)
    magnitudes = magnitudes_of_parts(Gpt2(size, dtype, is_tied=False), microbatches)
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None, fqn
        found = whole(parameter.grad)
        if "wte" not in fqn:
            assert torch.equal(found, grads[fqn]), fqn
            continue
        # Each stage's sum over micro-batches, and then these two.
        assert torch.equal(found, apart[fqn] + apart["model.lm_head.weight"])
        # 2 M - 1 additions on either side, each of which rounds by half a unit.
        bound = 2 * microbatches * torch.finfo(dtype).eps * magnitudes
        assert ((found - grads[fqn]).double().abs() <= bound).all()


def magnitudes_of_parts(model: nn.Module, microbatches: int) -> Tensor:
    """Return the sum of the magnitudes of all that is added to the tied weight's gradient."""
    *_, batch = batches(2, rows=8, length=6)
    total = torch.zeros((), dtype=torch.float64)
    for tensors in zip(*(x.chunk(microbatches) for x in batch.values()), strict=True):
        model.zero_grad()
        (model(dict(zip(batch, tensors, strict=True))) / microbatches).backward()
        for fqn, parameter in model.named_parameters():
            if fqn.endswith(("wte.weight", "lm_head.weight")):
                assert parameter.grad is not None
                total = total + parameter.grad.double().abs()
    return total


@pytest.mark.by_day("bfloat16")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_tied_weight_is_summed_over_micro_batches_on_each_stage_first(
    world2: World, dtype: torch.dtype
) -> None:
    world2.run(tied, 2, 4, dtype)


@pytest.mark.slow
@pytest.mark.nightly
def test_so_it_is_on_four_stages(world4: World) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        world4.run(tied, 4, 8, dtype)


CASES = [(schedule, 4) for schedule in SCHEDULES] + [
    ("interleaved_zero_bubble", 8), ("zbv", 8),
]  # fmt: skip


@pytest.mark.by_day("gpipe-4", "1f1b-4", "looped_bfs-4", "dualpipev-4")
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "microbatches"), CASES)
def test_two_ranks_have_the_bits_of_one_device(
    world2: World, schedule: str, microbatches: int
) -> None:
    _check(world2, "hand_written", schedule, 2, microbatches)


@pytest.mark.by_day("llama-zbv")
@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), [("llama", "zbv"), ("gpt2", "dualpipev")])
def test_models_of_transformers_too(world2: World, name: str, schedule: str) -> None:
    _check(world2, name, schedule, 2, 4)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "dualpipev"])
def test_four_ranks_too(world4: World, schedule: str) -> None:
    _check(world4, "hand_written", schedule, 4, 8)


def composed(constraints: Constraints) -> list[str]:
    """Compare two steps with one device in float64; return what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = make_plan(constraints)
        microbatches = plan.num_microbatches * plan.data_parallel.size
        _, grads = accumulated(model_of("hand_written", 4, torch.float64), microbatches)
        model, _ = vescale.parallelize(
            plan,
            model_of("hand_written", 4, torch.float64),
            lambda m: SGD(m.parameters(), lr=0.1),
        )
        replica = vescale.data_parallel_rank(model)
        for batch in batches(2, rows=8, length=6):
            model.zero_grad()
            parts = {key: x.chunk(plan.data_parallel.size) for key, x in batch.items()}
            model({key: chunks[replica] for key, chunks in parts.items()}).backward()
        for fqn, parameter in model.named_parameters():
            assert parameter.grad is not None, fqn
            # Sums over ranks are in another order.
            torch.testing.assert_close(whole(parameter.grad), grads[fqn], rtol=1e-10, atol=1e-12)
    return [str(each.message) for each in caught if "computes them together" in str(each.message)]


@pytest.mark.by_day("others3-would run blocks again")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({TP: 2}, None),
        ({DP: 2, ZERO: 2}, None),
        ({DP: 2, ZERO: 3}, "zero_stage 3 frees weights"),
        ({DP: 2, "recompute": "full"}, "would run blocks again"),
    ],
)
def test_zero_bubble_beside_other_parallelism(
    world4: World, others: Constraints, why: str | None
) -> None:
    for said in world4.run(composed, {**constraints_of("zbv", 2, 4), **others}):
        assert len(said) == (why is not None), said
        assert why is None or why in said[0]


@pytest.mark.nightly
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["hand_written", "llama", "gpt2"])
def test_every_model_under_every_schedule_on_two_ranks(
    world2: World, name: str, schedule: str, microbatches: int
) -> None:
    _check(world2, name, schedule, 2, microbatches)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [(each, m) for each in SCHEDULES for m in (4, 8) if (each, m) != ("dualpipev", 4)],
)
@pytest.mark.parametrize("name", ["hand_written", "llama", "gpt2"])
def test_every_model_under_every_schedule_on_four_ranks(
    world4: World, name: str, schedule: str, microbatches: int
) -> None:
    _check(world4, name, schedule, 4, microbatches)
