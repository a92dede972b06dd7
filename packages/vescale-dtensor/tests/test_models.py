"""Real models as programs on distributed tensors equal one device, dropout included."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vescale_dtensor import (
    DTensor,
    GatherWarning,
    InterleavedShard,
    distribute_module,
    distribute_tensor,
    emulate,
)
from vescale_testing import World

from . import hf_models

# What float64 models compute in float32 all the same (norms, rotary tables, T5's biases).
HALF_FLOAT32 = {"llama", "qwen2", "t5"}


def placements_by_hand(number: int, name: str, ndim: int) -> tuple[Placement, ...]:
    """Return different placements for neighbouring parameters."""
    if name.endswith("c_attn.weight"):
        return (Replicate(), InterleavedShard(1, 3))
    return (
        (Replicate(), Shard(0)),
        (Shard(0), Shard(ndim - 1)),
        (Replicate(), Shard(ndim - 1)),
        (Shard(0), Replicate()),
    )[number % 4]


def distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in model.named_modules():
        for own, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                given = placements_by_hand(len(made), f"{name}.{own}", parameter.ndim)
                made[parameter] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, given))
            module._parameters[own] = made[parameter]


def tolerance(family: str, dtype: torch.dtype) -> float:
    # float64: sums in another order; a few hundred roundings of 1e-16.
    return 1e-5 if family in HALF_FLOAT32 or dtype is torch.float32 else 1e-12


def check(family: str, attention: str, train: bool) -> None:
    warnings.simplefilter("ignore", GatherWarning)
    given = hf_models.batch(family)
    plain = hf_models.make(family, attention).train(train)
    expected = hf_models.run(plain, given)
    drawn = torch.get_rng_state()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = hf_models.make(family, attention).train(train)
    distribute(model, mesh)
    by_sample = {
        name: distribute_tensor(value, mesh, (Shard(0), Replicate()))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in given.items()
    }
    logits = hf_models.run(model, by_sample)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert isinstance(logits, DTensor)
    atol = tolerance(family, expected.dtype)
    scale = expected.abs().max()
    torch.testing.assert_close(whole(logits) / scale, expected / scale, rtol=0.0, atol=atol)
    # Some gradients are zero but for rounding (those of key biases), so one scale for all.
    size = max(p.grad.abs().max() for p in plain.parameters() if p.grad is not None)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert isinstance(q.grad, DTensor)
            torch.testing.assert_close(whole(q.grad) / size, p.grad / size, rtol=0.0, atol=atol)


def whole(tensor: DTensor) -> torch.Tensor:
    full = tensor.full_tensor()
    return getattr(full, "parts", (full,))[-1]


@pytest.mark.by_day(
    "gpt2-*",
    "llama-*-train",
    "bert-sdpa-train",
    "mixtral-sdpa-eval",
    "qwen2-eager-train",
    "vit-*-train",
)
@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", sorted(hf_models.FAMILIES))
def test_a_model_equals_one_device(family: str, attention: str, train: bool) -> None:
    with emulate(4, rank=1):
        check(family, attention, train)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_on_four_processes_equals_one_device(world4: World, family: str) -> None:
    world4.run(check, family, "sdpa", True)


def _run_packed(layer: nn.Module, sequences: Tensor) -> tuple[Tensor, Tensor]:
    packed = pack_padded_sequence(sequences, [2, 7, 5], batch_first=True, enforce_sorted=False)
    found, last = layer(packed)
    padded, _ = pad_packed_sequence(found, batch_first=True)
    (padded.square().sum() + last.sum()).backward()
    return padded, last


@pytest.mark.filterwarnings("ignore:.*were gathered")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
def test_packed_sequences_of_several_lengths_are_those_of_one_device(placement: Placement) -> None:
    torch.manual_seed(0)
    plain, sequences = nn.GRU(4, 5, batch_first=True), torch.randn(3, 7, 4, requires_grad=True)
    with emulate(3):
        mesh = init_device_mesh("cpu", (3,))
        layer = distribute_module(copy.deepcopy(plain), mesh)
        parts = distribute_tensor(sequences.detach(), mesh, (placement,)).requires_grad_()
        expected, found = _run_packed(plain, sequences), _run_packed(layer, parts)
        pairs = [*zip(expected, found, strict=True), (sequences.grad, parts.grad)]
        grads = zip(plain.parameters(), layer.parameters(), strict=True)
        pairs += [(one.grad, other.grad) for one, other in grads]
        for one, other in pairs:
            assert one is not None
            assert other is not None
            assert other.tolist() == one.tolist()
