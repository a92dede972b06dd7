"""What tensor parallelism sends: counted, per layer, and against the emulated DTensor program."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import vescale
from vescale_dtensor import CommCounter, DTensor, Replicate, Shard, distribute_tensor, emulate
from vescale_parallel import tensor_parallel_plan
from vescale_testing import World

from .families import CONFIGS, hugging_face, tokens
from .plans import SEQUENCE, TP, Constraints, make_plan

HIDDEN, ROWS, LENGTH = 32, 4, 12
# A reduce-scatter in rank order is an all-to-all and a local sum; with an all-gather, a reduction.
FOUR_ALL_REDUCES = {"all_to_all": 4, "all_gather": 4}
# What a ring sends: 2 (n - 1) / n of an activation of float32.
NBYTES = 4 * (2 * 3 * ROWS * LENGTH * HIDDEN * 4 // 4)


def llama(layers: int) -> nn.Module:
    torch.manual_seed(3)
    return hugging_face("llama", "sdpa", **{**CONFIGS["llama"], "num_hidden_layers": layers})


def collectives(constraints: Constraints, layers: int) -> list[tuple[Counter[str], int]]:
    """Return the collectives of a forward and of its backward, and the bytes of each."""
    model = vescale.parallelize(make_plan(constraints), llama(layers))
    found: list[tuple[Counter[str], int]] = []
    with CommCounter() as forward:
        loss = model(**tokens()).loss
    with CommCounter() as backward:
        loss.backward()
    for counter in (forward, backward):
        kinds = Counter(event.kind for event in counter.events)
        found.append((kinds, counter.nbytes))
    return found


def of_two_layers(world: World, constraints: Constraints) -> list[tuple[dict[str, int], int]]:
    """Return what four layers send more than two."""
    more, fewer = (world.run(collectives, constraints, layers)[0] for layers in (4, 2))
    return [
        (dict(kinds - other), nbytes - other_nbytes)
        for (kinds, nbytes), (other, other_nbytes) in zip(more, fewer, strict=True)
    ]


@pytest.mark.nightly
@pytest.mark.slow
def test_two_layers_on_four_ranks_all_reduce_four_times_each_way(world4: World) -> None:
    forward, backward = of_two_layers(world4, {TP: 4})
    assert forward == (FOUR_ALL_REDUCES, NBYTES)
    assert backward == (FOUR_ALL_REDUCES, NBYTES)


@pytest.mark.nightly
@pytest.mark.slow
def test_with_the_sequence_cut_they_gather_and_scatter_four_times_each_way(
    world4: World,
) -> None:
    forward, backward = of_two_layers(world4, {TP: 4, SEQUENCE: True})
    # The same halves, apart from each other.
    assert forward == (FOUR_ALL_REDUCES, NBYTES)
    # The gradients of the norms' weights are partial values then: more bytes in one all-reduce.
    assert backward == (FOUR_ALL_REDUCES, NBYTES + 2 * (2 * 3 * 2 * HIDDEN * 4 // 4))


def erased(layers: int) -> tuple[Tensor, dict[str, Tensor]]:
    model: Any = vescale.parallelize(make_plan({TP: 2}), llama(layers))
    loss = model(**tokens()).loss
    loss.backward()
    return loss.detach(), {n: p.grad.full_tensor() for n, p in model.named_parameters()}


class SummedGradient(torch.autograd.Function):
    """Where an activation enters a region: its gradients, partial values, are summed there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> DTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.redistribute(placements=(Replicate(),))


def of_first(x: Any) -> Tensor:
    return x.full_tensor().of_rank(0)


def as_dtensors(layers: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the same plan as an emulated program on DTensors, summing where the plan says."""
    model = llama(layers)
    plan = tensor_parallel_plan(model, "auto", 2)
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for fqn, parameter in list(model.named_parameters()):
            owner, _, name = fqn.rpartition(".")
            text = plan.get(re.sub(r"\d+", "*", fqn), "Replicate()")
            placed = Replicate() if text == "Replicate()" else Shard(int(text[6:-1]))
            cut = nn.Parameter(distribute_tensor(parameter.detach(), mesh, (placed,)))
            model.get_submodule(owner)._parameters[name] = cut
        for fqn, module in model.named_modules():
            if fqn.endswith("norm"):
                module.register_forward_hook(lambda _, args, out: SummedGradient.apply(out))
            if fqn.endswith(("embed_tokens", "o_proj", "down_proj")):
                module.register_forward_hook(
                    lambda _, args, out: out.redistribute(placements=(Replicate(),))
                )
        loss = model(**tokens()).loss
        loss.backward()
        assert isinstance(loss, DTensor)
        grads = {n: of_first(p.grad) for n, p in model.named_parameters()}
        return of_first(loss.detach()), grads


@pytest.mark.slow
def test_plain_tensors_and_hooks_have_the_bits_of_the_program_on_dtensors(world2: World) -> None:
    loss, grads = as_dtensors(2)
    for found, found_grads in world2.run(erased, 2):
        assert torch.equal(found, loss)
        unequal = [
            name for name, grad in grads.items() if not torch.equal(found_grads[name], grad)
        ]
        assert unequal == []
