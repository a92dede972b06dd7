"""What a rank sends, and what it holds, under every ZeRO stage: counted, next to the theory."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vescale
from vescale_dtensor import CommCounter
from vescale_parallel import ParallelPlan, with_constraints

from .fake_ranks import IDS, WARM_UP, adamw, llama, rank_0_of

pytestmark = [
    pytest.mark.slow,
    # All ranks of a fake process group say what this one says.
    pytest.mark.filterwarnings("ignore:.* data-parallel ranks were called with 1 different"),
]

HALF = {"precision.param": "bfloat16"}
# Bytes of a parameter element and step, of a ring: what is sent times ranks / (ranks - 1).
# A gather and a reduction are one time an element each, a sum of copies is both.
BYTES: dict[str, tuple[dict[str, Any], int]] = {
    "stage 0": ({"data_parallel.zero_stage": 0}, 4 + 4),
    "stage 1": ({"data_parallel.zero_stage": 1}, 4 + 4),
    "stage 2": ({"data_parallel.zero_stage": 2}, 4 + 4),
    "stage 3, kept": (
        {"data_parallel.zero_stage": 3, "data_parallel.reshard_after_forward": False},
        4 + 4,
    ),
    # Blocks are gathered again in backward, but for the last one; what is outside of them is not.
    "stage 3": ({"data_parallel.zero_stage": 3}, 4 + 4 + 4),
    "stage 1, bfloat16": ({"data_parallel.zero_stage": 1, **HALF}, 2 + 2),
    "stage 3, bfloat16": ({"data_parallel.zero_stage": 3, **HALF}, 2 + 2 + 2),
    "stage 3, bfloat16 summed in float32": (
        {"data_parallel.zero_stage": 3, **HALF, "precision.reduce": "float32"},
        2 + 2 + 4,
    ),
}


def _parallel(ranks: int, constraints: dict[str, Any]) -> Any:
    said = {"data_parallel.size": ranks, **constraints}
    return vescale.parallelize(with_constraints(ParallelPlan(), said), llama(), adamw)


@pytest.mark.by_day("stage 3, bfloat16 summed in float32")
@pytest.mark.parametrize("name", BYTES)
def test_bytes_of_a_parameter_element_and_step(name: str) -> None:
    ranks, (constraints, expected) = 64, BYTES[name]
    with rank_0_of(ranks):
        model, optimizer = _parallel(ranks, constraints)
        for _ in range(WARM_UP):
            _step(model, optimizer)
        with CommCounter() as counter:
            _step(model, optimizer)
    sent = sum(event.nbytes for event in counter.events) * ranks / (ranks - 1)
    numel = sum(p.numel() for p in model.parameters())
    total = expected * numel
    if constraints["data_parallel.zero_stage"] == 3 and not name.endswith("kept"):
        last = max(n.split(".")[2] for n, _ in model.named_parameters() if ".layers." in n)
        again = f"model.layers.{last}."
        once = sum(
            p.numel()
            for n, p in model.named_parameters()
            if not n.startswith("model.layers.") or n.startswith(again)
        )
        total -= once * (2 if "precision.param" in constraints else 4)
    # Shards of what does not divide are padded, rows are multiples of 128 bytes.
    assert total <= sent <= 1.01 * total


def test_copies_that_share_out_state_gather_and_reduce_once_a_step() -> None:
    """And within a copy ranks send what they send without."""
    ranks, copies = 64, 8
    groups = 4 + 1  # blocks, and what is outside of them
    within, between = dict[int, Counter[str]](), dict[int, Counter[str]]()
    for shares in (0, 1):
        said = {
            "data_parallel.zero_stage": 3,
            "data_parallel.replicate_size": copies,
            "data_parallel.replicate_zero_stage": shares,
        }
        with rank_0_of(ranks):
            model, optimizer = _parallel(ranks, said)
            for _ in range(WARM_UP):
                _step(model, optimizer)
            with CommCounter() as counter:
                _step(model, optimizer)
        for over, found in (("dp_shard", within), ("dp_replicate", between)):
            # Not what ranks tell each other of their order, and of what has changed.
            events = [e for e in counter.events if e.over == over and e.nbytes > 2**12]
            found[shares] = Counter(event.kind for event in events)
            for event in events:
                found[shares][f"bytes of {event.kind}"] += event.nbytes
    numel = sum(p.numel() for p in model.parameters()) // (ranks // copies)
    once = 4 * numel * (copies - 1) / copies
    # Shards of what does not divide are padded.
    for kind in ("all_gather", "all_to_all"):
        assert between[1][kind] == groups
        assert once <= between[1][f"bytes of {kind}"] <= 1.01 * once
    assert within[0].keys() == within[1].keys()
    for what, number in within[0].items():
        assert number == pytest.approx(within[1][what], rel=0.01), what


def _step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _tensors() -> list[Tensor]:
    gc.collect()
    return [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]


def _references() -> list[weakref.ref[Tensor]]:
    """Return references to the tensors of this process, which keep none of them."""
    return [weakref.ref(x) for x in _tensors()]


def _held_besides(others: list[weakref.ref[Tensor]]) -> int:
    """Return the bytes of all tensors of this process but those, which it may hold or not.

    A difference of two totals would count what an earlier test left and this one freed. What
    several storages are in counts once.
    """
    left = {x.untyped_storage().data_ptr() for ref in others if (x := ref()) is not None}
    found = {(s.data_ptr(), s.nbytes()) for s in (x.untyped_storage() for x in _tensors())}
    held = end = 0
    for first, nbytes in sorted(each for each in found if each[0] not in left):
        held += max(first + nbytes - max(first, end), 0)
        end = max(end, first + nbytes)
    return held


# What is held on a CPU between the steps of a loop that keeps its gradients, by stage, besides
# the gradient of this rank's shard and AdamW's two moments: 12 bytes of an element / ranks. The
# groups of parameters are a block each, and what is outside of the blocks.
BESIDES: dict[int, Callable[[int, int, int], float]] = {
    # Parameters, and what arrives from other ranks, of the largest group.
    0: lambda whole, block, outside: 4 * (whole + max(block, outside)),
    # And whole parameters, which the shard is a part of, and rows of the gradients of one block
    # and of what is outside.
    # Under ZeRO 1 of two blocks: those of one are under way while those of the next are written.
    1: lambda whole, block, outside: 4 * (whole + 2 * block + outside + max(block, outside)),
    2: lambda whole, block, outside: 4 * (whole + block + outside + max(block, outside)),
    3: lambda whole, block, outside: 4 * (block + outside + max(block, outside)),
}
# Stages whose shard is memory of its own.
APART = (3,)


# What arrives of other ranks is as large as the largest group's gradients, however many they are.
@pytest.mark.by_day("0-8")
@pytest.mark.parametrize(("stage", "ranks"), [*((stage, 8) for stage in BESIDES), (3, 64)])
def test_memory_between_steps_is_that_of_the_theory(stage: int, ranks: int) -> None:
    others = _references()
    with rank_0_of(ranks):
        model, optimizer = _parallel(ranks, {"data_parallel.zero_stage": stage})
        for _ in range(WARM_UP):
            optimizer.zero_grad()
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
    numels = {name: p.numel() for name, p in model.named_parameters()}
    block = sum(n for name, n in numels.items() if name.startswith("model.layers.0."))
    outside = sum(n for name, n in numels.items() if not name.startswith("model.layers."))
    whole = sum(numels.values())
    theory = 12 * whole / (ranks if stage else 1) + BESIDES[stage](whole, block, outside)
    theory += 4 * whole / ranks if stage in APART else 0
    assert _held_besides(others) == pytest.approx(theory, rel=0.05)


@pytest.mark.by_day("None")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_memory_of_copies_that_share_out_state_is_that_of_the_theory(dtype: str | None) -> None:
    ranks, copies, others = 8, 4, _references()
    said = {
        "data_parallel.zero_stage": 3,
        "data_parallel.replicate_size": copies,
        "data_parallel.replicate_zero_stage": 1,
    }
    with rank_0_of(ranks):
        model, optimizer = _parallel(ranks, {**said, "precision.param": dtype})
        for _ in range(WARM_UP):
            optimizer.zero_grad()
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
    numels = {name: p.numel() for name, p in model.named_parameters()}
    block = sum(n for name, n in numels.items() if name.startswith("model.layers.0."))
    outside = sum(n for name, n in numels.items() if not name.startswith("model.layers."))
    whole, largest = sum(numels.values()), max(block, outside)
    compute = 4 if dtype is None else 2
    # Gradient and moments of what this rank updates; what it sends, of which that is a part in its
    # place if it computes in the dtype that it is updated in.
    kept = 12 * whole / ranks + compute * whole / (ranks // copies)
    kept += 0 if dtype is None else 4 * whole / ranks
    # Rows of gradients, those of a block under way to other copies while the next are written; and
    # what arrives within a copy.
    rows = 2 * block + outside + largest
    assert _held_besides(others) == pytest.approx(kept + compute * rows, rel=0.05)


@pytest.mark.by_day("0")
@pytest.mark.parametrize("stage", [0, 1])
def test_nothing_is_kept_for_gradients_that_micro_batches_add_up_first(stage: int) -> None:
    """It would lie idle beside them: as much memory again."""
    ranks, others = 8, _references()
    said = {"data_parallel.zero_stage": stage, "batch.gradient_accumulation": 2}
    ids = IDS.repeat(2, 1)
    with rank_0_of(ranks):
        model, optimizer = _parallel(ranks, said)
        for _ in range(WARM_UP):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    whole = sum(p.numel() for p in model.parameters())
    # Parameters, and the two moments of this rank's shard.
    theory = 4 * whole + 8 * whole / (ranks if stage else 1)
    # Padding to 128 bytes, and small tensors; rows that were kept would be a third and more.
    assert _held_besides(others) == pytest.approx(theory, rel=0.05)
