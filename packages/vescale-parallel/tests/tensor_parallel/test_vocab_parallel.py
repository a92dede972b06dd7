"""Conversions between plain tensors and logits that are cut by vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import CommCounter, DTensor, Replicate, Shard, distribute_tensor
from vescale_parallel._loss.token_mean import TokenMeans
from vescale_parallel._tensor_parallel.vocabulary.vocab_parallel import (
    LiftPlain,
    keep_sharded,
    returned,
)
from vescale_testing import World

# Over two ranks 5 classes are 3 and 2.
NUM_CLASSES, WIDTH, NUM_TOKENS = 5, 3, 4


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def heads(mesh: DeviceMesh) -> tuple[nn.Linear, nn.Linear, slice]:
    """Return a whole head, this rank's part of it, and the classes that the part has."""
    torch.manual_seed(0)
    whole = nn.Linear(WIDTH, NUM_CLASSES, bias=False, dtype=torch.float64)
    places = torch.arange(NUM_CLASSES).chunk(mesh.size())[mesh.get_local_rank()]
    own = slice(int(places[0]), int(places[-1]) + 1)
    part = nn.Linear(WIDTH, len(places), bias=False, dtype=torch.float64)
    part.weight = nn.Parameter(whole.weight.detach()[own].clone())
    keep_sharded(part, mesh, num_features=NUM_CLASSES)
    return whole, part, own


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(NUM_TOKENS, WIDTH, dtype=torch.float64), torch.tensor([4, 0, -100, 2])


def check_head() -> None:
    whole, part, own = heads(tp_mesh())
    x_NF, targets_N = inputs()
    expected = F.cross_entropy(whole(x_NF), targets_N)
    expected.backward()
    with CommCounter() as counter:
        logits_NV = part(x_NF)
    assert counter.num_collectives == 0
    assert isinstance(logits_NV, DTensor)
    assert logits_NV.placements == (Shard(1),)
    assert logits_NV.shape == (NUM_TOKENS, NUM_CLASSES)
    F.cross_entropy(logits_NV, targets_N).backward()
    assert type(part.weight.grad) is Tensor
    assert whole.weight.grad is not None
    # A dozen float64 terms, added in another order.
    torch.testing.assert_close(part.weight.grad, whole.weight.grad[own], rtol=1e-13, atol=1e-16)


def test_a_head_hands_on_its_part_as_cut_logits_and_gets_its_gradient(world2: World) -> None:
    world2.run(check_head)


def check_lifted() -> None:
    mesh = tp_mesh()
    x_NV = torch.randn(NUM_TOKENS, NUM_CLASSES, dtype=torch.float64)
    scale, offset_V = torch.tensor([0.5, -0.5]).double(), torch.randn(NUM_CLASSES).double()
    grads: list[list[Tensor]] = []
    for logits_NV in (x_NV, distribute_tensor(x_NV, mesh, (Shard(1),))):
        plain = [scale.clone().requires_grad_(), offset_V.clone().requires_grad_()]
        with LiftPlain(mesh):
            made_NV = torch.add(logits_NV * plain[0].exp().sum(), other=plain[1])
            loss = torch.stack([made_NV.logsumexp(-1).sum(), plain[0].square().sum()]).prod()
        grads.append([*torch.autograd.grad(loss, plain)])
    for expected, found in zip(*grads, strict=True):
        assert type(found) is Tensor
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_plain_tensors_that_meet_cut_ones_get_whole_gradients(world2: World) -> None:
    world2.run(check_lifted)


def check_written() -> None:
    mesh = tp_mesh()
    x_TNV = torch.randn(3, NUM_TOKENS, NUM_CLASSES, dtype=torch.float64)
    targets_TN = torch.arange(3 * NUM_TOKENS).view(3, NUM_TOKENS) % NUM_CLASSES
    for write in (Tensor.__setitem__, lambda all_, step, x: all_[step].copy_(x)):
        found: list[tuple[Tensor, Tensor]] = []
        for given in (x_TNV, distribute_tensor(x_TNV, mesh, (Shard(2),))):
            x = given.detach().requires_grad_()
            with LiftPlain(mesh):
                all_TNV = torch.zeros(3, NUM_TOKENS, NUM_CLASSES, dtype=torch.float64)
                for step in range(3):
                    write(all_TNV, step, x[step] * (step + 1))
                loss = F.cross_entropy(all_TNV.flatten(0, 1), targets_TN.flatten())
            loss.backward()
            assert type(loss) is Tensor
            assert x.grad is not None
            found.append((loss, whole(x.grad)))
        # Cut and whole logits are summed in another order, in float64.
        torch.testing.assert_close(found[1], found[0], rtol=1e-13, atol=1e-16)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_logits_that_are_written_into_a_plain_tensor_get_their_gradients(world2: World) -> None:
    world2.run(check_written)


def check_untouched() -> None:
    with LiftPlain(tp_mesh()):
        x = torch.ones(2, requires_grad=True)
        assert type(x + 1) is Tensor


def test_plain_tensors_among_themselves_stay_plain(world2: World) -> None:
    world2.run(check_untouched)


@dataclass
class Opaque:
    """Something that a model may return, and that is no structure to torch."""

    logits: Tensor


def check_returned() -> None:
    mesh = tp_mesh()
    logits = distribute_tensor(torch.randn(4, 6).double(), mesh, (Shard(1),)).requires_grad_()
    opaque = Opaque(logits)
    unchanged = {"logits": logits, "more": [opaque, None, 3, torch.ones(2)]}
    assert returned(unchanged, mesh) is unchanged
    pending = logits.sum(1)
    assert isinstance(pending, DTensor)
    assert pending.placements != (Replicate(),)
    found = returned({**unchanged, "loss": pending.sum(), "by_row": pending}, mesh)
    assert found["logits"] is logits
    assert found["more"][0] is opaque
    assert type(found["loss"]) is Tensor
    full = logits.detach()
    assert isinstance(full, DTensor)
    torch.testing.assert_close(found["by_row"].detach(), full.full_tensor().sum(1))
    (found["loss"] * 3).backward()
    assert isinstance(logits.grad, DTensor)
    assert torch.equal(logits.grad.full_tensor(), torch.full((4, 6), 3.0).double())


def test_what_a_model_returns_is_plain_unless_it_is_cut(world2: World) -> None:
    world2.run(check_returned)


def check_warnings() -> None:
    mesh = tp_mesh()
    _, head, _ = heads(mesh)
    x_NF, targets_N = inputs()
    with TokenMeans(2, lambda index, count: count) as means:
        logits_NV = head(x_NF)
        mean = F.cross_entropy(logits_NV, targets_N) + logits_NV.logsumexp(-1).square().mean()
        total = F.cross_entropy(logits_NV, targets_N, reduction="sum")
    means.warn_of_sums(returned(mean, mesh))
    with pytest.warns(UserWarning, match="the loss contains a sum over the batch"):
        means.warn_of_sums(returned(total, mesh) / 4)


def test_sums_are_found_in_losses_of_cut_logits(world2: World) -> None:
    world2.run(check_warnings)
