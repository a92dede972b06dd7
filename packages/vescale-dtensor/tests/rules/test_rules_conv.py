"""Convolutions and operators on images, against plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_dtensor import DTensor, RankTensor, distribute_tensor, emulate

from .rule_checks import check, sent_bytes


@pytest.fixture(autouse=True)
def ranks() -> Iterator[None]:
    torch.manual_seed(0)
    with emulate(4):
        yield


def values(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


CONVOLUTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], int]] = {
    "1d": (F.conv1d, (4, 6, 9), (8, 6, 3), 8),
    "2d": (lambda *a: F.conv2d(*a, stride=2, padding=1), (3, 4, 6, 5), (6, 4, 3, 3), 6),
    "3d": (F.conv3d, (2, 3, 4, 3, 3), (4, 3, 2, 2, 2), 4),
    "transposed": (F.conv_transpose2d, (3, 4, 3, 3), (4, 6, 2, 2), 6),
    "depthwise": (lambda *a: F.conv2d(*a, groups=6), (3, 6, 4, 4), (6, 1, 3, 3), 6),
    "grouped": (lambda *a: F.conv2d(*a, groups=2), (4, 4, 4, 4), (8, 2, 3, 3), 8),
    "of one sample": (F.conv2d, (4, 5, 5), (6, 4, 3, 3), 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_those_of_one_device(name: str) -> None:
    function, values_shape, weight_shape, channels = CONVOLUTIONS[name]
    for seed in range(2):
        x, w, b = values(*values_shape), values(*weight_shape), values(channels)
        check(function, x, w, b, seed=seed)
        check(function, x, w, seed=seed)
        check(lambda w, x, b: function(x, w, b), w, x, b, seed=seed)


IMAGES: dict[str, tuple[Callable[[Tensor], Any], tuple[int, ...]]] = {
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (3, 6, 8)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2, return_indices=True), (3, 6, 4, 5)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (3, 4, 4, 4, 2)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (3, 6, 8)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2, padding=1), (3, 6, 4, 5)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (3, 4, 4, 4, 2)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), (3, 6, 4, 5)),
    "global_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), (3, 6, 4, 5)),
    "adaptive_avg_pool3d": (lambda x: F.adaptive_avg_pool3d(x, 2), (3, 4, 4, 4, 2)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), (3, 6, 4, 5)),
    "of one sample": (lambda x: F.max_pool2d(x, 2), (6, 4, 5)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (3, 6, 4, 5)),
    "linear": (lambda x: F.interpolate(x, 11, mode="linear"), (3, 6, 5)),
    "bilinear": (lambda x: F.interpolate(x, (3, 7), mode="bilinear"), (3, 6, 4, 5)),
    "bicubic": (lambda x: F.interpolate(x, (3, 7), mode="bicubic"), (3, 6, 4, 5)),
    "trilinear": (lambda x: F.interpolate(x, (3, 7, 2), mode="trilinear"), (3, 2, 4, 5, 3)),
    "constant pad": (lambda x: F.pad(x, (1, 2, 0, 0, 1, 0)), (3, 6, 4, 5)),
    "pad of ones": (lambda x: F.pad(x, (1, 2), value=1.0), (3, 6, 4)),
    "negative pad": (lambda x: F.pad(x, (-1, 2)), (3, 6, 4)),
    "reflection pad": (lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect"), (3, 6, 4, 5)),
    "replication pad": (lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"), (3, 6, 4, 5)),
    "unfold": (lambda x: F.unfold(x, 2), (3, 6, 4, 5)),
    "fold": (lambda x: F.fold(x, (3, 3), 2), (3, 8, 4)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (3, 8, 4, 5)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (3, 2, 4, 6)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (3, 6, 4, 5)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_operators_on_planes_are_those_of_one_device(name: str) -> None:
    function, shape = IMAGES[name]
    check(function, values(*shape))
    # A mean of cut planes is added up in another order, and the kernel of bilinear resizing
    # depends on the number of channels that a rank has.
    if name not in ("global_avg_pool2d", "bilinear"):
        check(function, values(*shape), exact=True, only=lambda p: Partial() not in p)


def test_sampling_at_places_of_a_grid() -> None:
    grid = torch.rand(3, 2, 5, 2, dtype=torch.float64) * 2 - 1
    for seed in range(3):
        check(
            lambda x, g: F.grid_sample(x, g, align_corners=False),
            values(3, 4, 6, 5), grid.clone().requires_grad_(), seed=seed,
        )  # fmt: skip


def test_batches_and_channels_move_nothing() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.randn(8, 4, 8, 8), mesh, (Shard(0), Replicate()))
    w = distribute_tensor(torch.randn(8, 4, 3, 3), mesh, (Replicate(), Shard(0)))
    b = distribute_tensor(torch.randn(8), mesh, (Replicate(), Shard(0)))
    assert sent_bytes(F.conv2d, x, w, b) == 0
    y = F.conv2d(x, w, b)
    assert y.placements == (Shard(0), Shard(1))  # pyright: ignore[reportAttributeAccessIssue]: a DTensor
    assert sent_bytes(lambda: F.max_pool2d(F.interpolate(y, scale_factor=2), 2)) == 0
    second = distribute_tensor(torch.randn(4, 8, 3, 3), mesh, (Replicate(), Shard(1)))
    bias = distribute_tensor(torch.randn(4), mesh, (Replicate(), Replicate()))
    assert sent_bytes(F.conv2d, y, second, bias) == 0
    assert F.conv2d(y, second, bias).placements == (Shard(0), Partial())  # pyright: ignore[reportAttributeAccessIssue]: a DTensor


def test_padding_of_nothing_is_all_there_is() -> None:
    nothing = torch.empty(0, 3, 3, dtype=torch.float64)
    check(lambda x: F.pad(x, (1, 1, 0, 0, 1, 1), value=2.0), nothing)
    nothing = torch.empty(0, 3, 3, 3, dtype=torch.float64)
    check(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), nothing)


def _resized(mode: str, **how: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, size=(3, 7), mode=mode, **how)


ROUNDED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.dtype]] = {
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (3, 6, 8), torch.int64),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2, padding=1), (3, 6, 4, 5), torch.int64),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (3, 4, 4, 4, 2), torch.int64),
    "bilinear": (_resized("bilinear"), (1, 3, 4, 5), torch.uint8),
    "bicubic": (_resized("bicubic"), (1, 3, 4, 5), torch.uint8),
    "antialiased": (_resized("bilinear", antialias=True), (1, 3, 4, 5), torch.uint8),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_rounded_to_integers_is_a_sum_not_its_terms(name: str) -> None:
    function, shape, dtype = ROUNDED[name]
    mesh = init_device_mesh("cpu", (4,))
    terms = torch.randint(0, 16, (4, *shape), dtype=dtype)
    pending = DTensor.from_local(RankTensor(list(terms)), mesh, [Partial()], shape=shape)
    found = function(pending)
    assert isinstance(found, DTensor)
    assert torch.equal(found.full_tensor(), function(terms.sum(0, dtype=dtype)))
