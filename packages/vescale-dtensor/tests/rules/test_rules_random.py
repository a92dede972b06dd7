"""Random operators on distributed tensors draw what one device draws, and as much."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import vescale_dtensor
from vescale_dtensor import (
    DTensor,
    GatherWarning,
    InterleavedShard,
    RaggedShard,
    distribute_tensor,
    emulate,
)
from vescale_testing import World

LAYOUTS: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
    (RaggedShard((0,), 1, (0, 6)), Shard(1)),
    (RaggedShard((0, 1), 7, (100, 4000)), Replicate()),
    (InterleavedShard(0, 3), Shard(0)),
    (Replicate(), Partial()),
]

PROGRAMS: dict[str, Callable[[Tensor, Generator], Tensor]] = {
    "dropout": lambda x, g: F.dropout(x, 0.3),
    "alpha_dropout": lambda x, g: F.alpha_dropout(x, 0.2),
    "dropout1d": lambda x, g: F.dropout1d(x, 0.5),
    "rand_like": lambda x, g: torch.rand_like(x),
    "randn_like": lambda x, g: torch.randn_like(x),
    "randn_like transposed": lambda x, g: torch.randn_like(x.t()),
    "randint_like": lambda x, g: torch.randint_like(x, 0, 100),
    "uniform_": lambda x, g: x.clone().uniform_(-1, 2, generator=g),
    "normal_": lambda x, g: x.clone().normal_(2, 3, generator=g),
    "random_": lambda x, g: x.clone().random_(0, 1000, generator=g),
    "exponential_": lambda x, g: x.clone().exponential_(generator=g),
    "log_normal_": lambda x, g: x.clone().log_normal_(generator=g),
    "cauchy_": lambda x, g: x.clone().cauchy_(generator=g),
    "geometric_": lambda x, g: x.clone().geometric_(0.3, generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x, generator=g),
    "bernoulli_": lambda x, g: x.clone().bernoulli_(0.3),
    "bernoulli_ tensor": lambda x, g: torch.zeros_like(x).bernoulli_(x),
    "normal": lambda x, g: torch.normal(x, x),
    "multinomial": lambda x, g: torch.multinomial(x, 2),
    "rrelu": lambda x, g: F.rrelu(x - 0.5, training=True),
    "gumbel_softmax": lambda x, g: F.gumbel_softmax(x),
    "trunc_normal_": lambda x, g: nn.init.trunc_normal_(x.clone()),
    "kaiming_uniform_": lambda x, g: nn.init.kaiming_uniform_(x.clone()),
    "xavier_normal_": lambda x, g: nn.init.xavier_normal_(x.clone()),
    "orthogonal_": lambda x, g: nn.init.orthogonal_(x.clone()),
    "sparse_": lambda x, g: nn.init.sparse_(x.clone(), 0.1),
}
# Their last steps are sums (softmax) or a factorization; the draws are the same all the same.
ROUNDED = {"gumbel_softmax", "orthogonal_", "alpha_dropout"}


def run(name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5)
    # From the middle of a block, with a spare normal waiting.
    torch.randn(3)
    torch.randn(3, generator=generator)
    result = PROGRAMS[name](x, generator)
    return result, torch.get_rng_state(), generator.get_state()


def check(shape: tuple[int, ...], dtype: torch.dtype, names: list[str]) -> None:
    warnings.simplefilter("ignore", GatherWarning)
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for name in names:
        expected, state, own_state = run(name, x)
        for placements in LAYOUTS:
            result, *states = run(name, distribute_tensor(x, mesh, placements))
            assert isinstance(result, DTensor)
            full = result.full_tensor()
            for whole in getattr(full, "parts", (full,)):
                if name in ROUNDED:
                    torch.testing.assert_close(whole, expected, msg=f"{name} {placements}")
                else:
                    assert torch.equal(whole, expected), (name, placements)
            assert torch.equal(states[0], state), (name, placements)
            assert torch.equal(states[1], own_state), (name, placements)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(6, 8), (6, 4001)])
def test_draws_are_those_of_one_device(shape: tuple[int, ...]) -> None:
    # sparse_ draws for one column after the other.
    names = [name for name in PROGRAMS if name != "sparse_" or shape[1] < 100]
    with emulate(4):
        check(shape, torch.float32, names)


def test_draws_are_made_on_the_device_that_is_asked_for() -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(torch.rand(6, 8), mesh, (Replicate(), Replicate()))
        for draw in (torch.rand_like, torch.randn_like):
            assert draw(x, device="meta").device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_draws_of_other_dtypes_are_those_of_one_device(dtype: torch.dtype) -> None:
    with emulate(4):
        check((6, 301), dtype, ["dropout", "uniform_", "normal_", "bernoulli", "randn_like"])


def test_draws_on_processes_are_those_of_one_device(world4: World) -> None:
    world4.run(check, (6, 301), torch.float32, ["dropout", "normal_", "multinomial", "bernoulli_"])


def _factories(placements: tuple[Placement, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for size in ((), (1,), (15,), (16,), (17,), (7, 1000)):
        for made, plain in (
            (vescale_dtensor.rand, torch.rand),
            (vescale_dtensor.randn, torch.randn),
        ):
            if not size and placements != (Replicate(), Replicate()):
                continue
            vescale_dtensor.manual_seed(11)
            expected = plain(size)
            state = torch.get_rng_state()
            vescale_dtensor.manual_seed(11)
            tensor = made(size, device_mesh=mesh, placements=placements)
            assert torch.equal(tensor.full_tensor().of_rank(3), expected)  # pyright: ignore[reportAttributeAccessIssue]: emulated
            assert torch.equal(torch.get_rng_state(), state)
    for made, plain in (
        (vescale_dtensor.zeros, torch.zeros),
        (vescale_dtensor.ones, torch.ones),
    ):
        whole = made(5, 3, device_mesh=mesh, placements=placements, dtype=torch.int64)
        assert torch.equal(whole.full_tensor().of_rank(2), plain(5, 3, dtype=torch.int64))  # pyright: ignore[reportAttributeAccessIssue]: emulated
    filled = vescale_dtensor.full((5, 3), 7, device_mesh=mesh, placements=placements)
    assert filled.dtype == torch.int64
    assert vescale_dtensor.empty(2, 2, device_mesh=mesh, placements=placements).shape == (2, 2)


@pytest.mark.parametrize(
    "placements", [(Replicate(), Replicate()), (Shard(0), Replicate()), (Shard(0), Shard(0))]
)
def test_factories_make_what_one_device_makes(placements: tuple[Placement, ...]) -> None:
    with emulate(4):
        _factories(placements)


def test_a_factory_refuses_pending_sums() -> None:
    with emulate(2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ValueError, match="none of them Partial"):
            vescale_dtensor.zeros(4, device_mesh=mesh, placements=(Partial(),))


def _sdpa(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)


def test_dropout_in_attention_is_that_of_one_device() -> None:
    x = torch.randn(4, 4, 6, 8, dtype=torch.float64)
    with emulate(4):
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in ((Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Shard(2))):
            result = _sdpa(distribute_tensor(x, mesh, placements))
            assert isinstance(result, DTensor)
            torch.testing.assert_close(result.full_tensor().of_rank(1), _sdpa(x))  # pyright: ignore[reportAttributeAccessIssue]: emulated


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_parameters_that_one_device_refuses_are_refused(placement: Placement) -> None:
    with emulate(4):
        mesh = init_device_mesh("cpu", (4,))
        bad = distribute_tensor(torch.tensor([0.5, 0.5, 0.5, -2.0]), mesh, (placement,))
        for draw in (
            lambda: torch.bernoulli(bad),
            lambda: torch.zeros_like(bad).bernoulli_(bad),
            lambda: torch.bernoulli(bad * math.nan),
            lambda: torch.normal(bad.abs(), bad),
            lambda: torch.normal(bad, bad),
        ):
            with pytest.raises(RuntimeError, match="expects all elements of"):
                draw()
