"""Parts of deferred tensors, against slices of what ordinary construction makes."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_deferred import deferred_init, read
from vescale_dtensor import Box, InterleavedShard, local_boxes

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Holder(nn.Module):
    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.tensor = make()


def _ordinary_and_deferred(make: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(11)
    torch.empty(5).normal_()
    state = torch.get_rng_state()
    ordinary = _Holder(make).tensor.detach()
    end = torch.get_rng_state()
    torch.set_rng_state(state)
    deferred = deferred_init(_Holder, make).tensor
    assert torch.equal(torch.get_rng_state(), end)
    return ordinary, deferred


def _random_boxes(shape: tuple[int, ...], num_boxes: int) -> Iterator[Box]:
    generator = random.Random(0)
    for _ in range(num_boxes):
        ends = [sorted(generator.choices(range(size + 1), k=2)) for size in shape]
        yield Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


def _padded() -> Tensor:
    weight = torch.randn(30, 20)
    weight[3].fill_(0)
    return weight


def _by_rows() -> Tensor:
    weight = torch.zeros(30, 20)
    for row in range(0, 30, 10):
        weight[row : row + 10].normal_(0, row + 1)
    return weight


def _interleaved() -> Tensor:
    weight = torch.zeros(30, 20)
    weight[:, 0::2] = torch.arange(10.0).sin()
    weight[:, 1::2] = torch.rand(30, 10)
    return weight


def _of_bytes() -> Tensor:
    weight = torch.randn(6, 8)
    weight.view(torch.int32)[2] = 0
    return weight


def _drawn_again() -> Tensor:
    result = torch.randn(20, 30)
    while (mask := (result < -1) | (result > 1)).any():
        result = torch.where(mask, torch.randn(20, 30), result)
    return result


_SLICEABLE: dict[str, Callable[[], Tensor]] = {
    "uniform": lambda: torch.empty(37, 41).uniform_(-1, 2),
    "randint": lambda: torch.randint(0, 100, (20, 30)),
    "normal_3d": lambda: torch.randn(16, 3, 5),
    "transposed": lambda: torch.randn(30, 20).t(),
    "view": lambda: torch.randn(30, 20).view(5, 6, 20),
    "unflattened": lambda: torch.randn(600).view(30, 20),
    "steps": lambda: torch.randn(30, 20)[3:17:2, 1:9],
    "padding_row": _padded,
    "by_rows": _by_rows,
    "scaled": lambda: torch.randn(30, 20) * 0.3 + torch.rand(20),
    "in_place": lambda: torch.randn(30, 20).mul_(0.3).clamp_(-0.1, 0.1),
    "cast": lambda: torch.randn(30, 20).to(torch.bfloat16),
    "cat": lambda: torch.cat([torch.rand(10, 20), torch.randn(20, 20), torch.zeros(3, 20)]),
    "cat_dim_1": lambda: torch.cat([torch.rand(33, 10), torch.randn(33, 7)], 1),
    "stack": lambda: torch.stack([torch.rand(33, 10), torch.randn(33, 10)], 1),
    "expanded": lambda: torch.randn(1, 20).expand(10, 20),
    "where": lambda: torch.where(torch.rand(30, 20) > 0.5, torch.randn(30, 20), torch.zeros(20)),
    "filled_by_memory": lambda: torch.empty(30, 20).t().uniform_(),
    "full": lambda: torch.full((9, 9), 3.5),
    "drawn_again": _drawn_again,
    **{f"normal_{d}": lambda d=d: torch.empty(37, 41, dtype=d).normal_(0.3, 2) for d in _FLOATS},
    **{f"uniform_{d}": lambda d=d: torch.rand(37, 41, dtype=d) for d in _FLOATS},
    **{f"normal_16_{d}": lambda d=d: torch.randn(8, 32, dtype=d) for d in _FLOATS},
}
_OTHERS: dict[str, Callable[[], Tensor]] = {
    "flattened": lambda: torch.randn(30, 20).view(-1),
    "few_normals": lambda: torch.randn(3, 4),
    "interleaved": _interleaved,
    "of_bytes": _of_bytes,
    "tril": lambda: torch.randn(20, 20).tril(),
    "exp": lambda: torch.randn(20, 20).exp_() + torch.ones(20, 20),
    "outer": lambda: torch.outer(torch.arange(20.0), 1 / torch.arange(1.0, 11.0)),
    "trunc_normal": lambda: nn.init.trunc_normal_(torch.empty(20, 30), 0, 1, -1, 1),
    "orthogonal": lambda: nn.init.orthogonal_(torch.empty(20, 30)),
    "channels_last": lambda: torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "strided_normal": lambda: torch.empty(30, 20).t().normal_(),
    "bernoulli": lambda: torch.empty(30, 20).bernoulli_(0.3),
    "repeat": lambda: torch.rand(3, 5).repeat(4, 2),
    "mixed_types": lambda: torch.randn(3, 3, dtype=torch.bfloat16) * torch.tensor(2.5) + 1,
    "scalar": lambda: torch.rand(()) * 2,
    "one_element": lambda: torch.rand(1, 1) * torch.rand(1),
    "long_chain": lambda: _added(torch.rand(20, 5), 100),
}


def _added(tensor: Tensor, num_times: int) -> Tensor:
    for _ in range(num_times):
        tensor.add_(0.1)
    return tensor


@pytest.mark.parametrize("name", [*_SLICEABLE, *_OTHERS])
def test_a_part_is_a_slice_of_the_whole(name: str):
    ordinary, deferred = _ordinary_and_deferred({**_SLICEABLE, **_OTHERS}[name])
    for box in _random_boxes(tuple(ordinary.shape), 25):
        part = read(deferred, box)
        assert part.dtype == ordinary.dtype
        assert type(part) is Tensor
        assert torch.equal(part, ordinary[box.slices]), box
    assert torch.equal(read(deferred), ordinary)


@pytest.mark.parametrize("name", _SLICEABLE)
def test_sliceable_parts_are_computed_without_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    ordinary, deferred = _ordinary_and_deferred(_SLICEABLE[name])

    def refuse(snapshots: object) -> None:
        raise AssertionError(f"{name} was evaluated whole")

    monkeypatch.setattr("vescale_deferred._evaluation.partial_replay.replay", refuse)
    for box in _random_boxes(tuple(ordinary.shape), 5):
        assert torch.equal(read(deferred, box), ordinary[box.slices])


@pytest.mark.parametrize(
    "placements",
    [
        (Replicate(), Replicate()),
        (Shard(0), Replicate()),
        (Shard(1), Shard(0)),
        (Shard(0), Shard(0)),
        (Replicate(), InterleavedShard(0, 3)),
        (InterleavedShard(1, 2), Shard(0)),
    ],
)
def test_the_boxes_of_all_ranks_are_slices_of_the_whole(placements: tuple[Placement, ...]):
    mesh_shape = (3, 2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(36, 18 * 3, dtype=torch.bfloat16)
            self.embedding = nn.Embedding(36, 12, padding_idx=1)
            nn.init.normal_(self.qkv.weight, std=0.02)

    torch.manual_seed(3)
    ordinary = Net().state_dict()
    torch.manual_seed(3)
    deferred = deferred_init(Net).state_dict()
    for name in ("qkv.weight", "embedding.weight"):
        shape = ordinary[name].shape
        for rank in range(6):
            coordinate = divmod(rank, 2)
            for held in local_boxes(shape, mesh_shape, coordinate, placements):
                expected = ordinary[name][held.box.slices]
                assert torch.equal(read(deferred[name], held.box), expected)


def test_large_parts_are_read_in_bands_and_stay_exact():
    ordinary, deferred = _ordinary_and_deferred(
        lambda: torch.randn(3, 2001, 1009, dtype=torch.float32).mul_(0.5)
    )
    for box in (Box((0, 0, 0), (2, 2001, 1009)), Box((1, 7, 100), (2, 1900, 901))):
        assert torch.equal(read(deferred, box), ordinary[box.slices])


@pytest.mark.parametrize("bounds", [(-3.0, 3.0), (-1.0, 1.2), (0.2, 0.5)])
def test_searches_in_pieces_decide_as_the_whole_does(
    bounds: tuple[float, float], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("vescale_deferred._evaluation.partial_replay._FIRST_SEARCHED_NUMEL", 100)
    monkeypatch.setattr("vescale_deferred._evaluation.partial_replay._SEARCHED_NUMEL", 1000)
    for shape in ((70, 31), (3, 1200)):
        ordinary, deferred = _ordinary_and_deferred(
            lambda shape=shape: nn.init.trunc_normal_(torch.empty(shape), 0, 1, *bounds)
        )
        assert torch.equal(read(deferred), ordinary)


@pytest.mark.parametrize("limit", [-1.0, 0.5, 2.0])
@pytest.mark.parametrize("other", [torch.zeros(20), 3.0, torch.tensor(1.5, dtype=torch.float64)])
def test_where_chooses_all_some_or_none(limit: float, other: Tensor | float):
    def make() -> Tensor:
        condition = torch.rand(30, 20) > limit
        return torch.where(condition, torch.randn(30, 20, dtype=torch.bfloat16), other)

    ordinary, deferred = _ordinary_and_deferred(make)
    part = read(deferred, Box((3, 2), (20, 11)))
    assert part.dtype == ordinary.dtype
    assert torch.equal(part, ordinary[3:23, 2:13])


def test_a_read_neither_draws_nor_depends_on_other_reads():
    ordinary, deferred = _ordinary_and_deferred(lambda: torch.randn(100, 7))
    state = torch.get_rng_state()
    first = read(deferred, Box((90, 0), (10, 7)))
    read(deferred, Box((0, 0), (10, 7)))
    again = read(deferred, Box((90, 0), (10, 7)))
    assert torch.equal(first, again)
    assert torch.equal(first, ordinary[90:])
    assert torch.equal(state, torch.get_rng_state())
    first.zero_()
    assert torch.equal(read(deferred), ordinary)


def test_real_tensors_are_copied():
    tensor = torch.rand(4, 4)
    part = read(tensor, Box((1, 0), (2, 4)))
    assert torch.equal(part, tensor[1:3])
    part.zero_()
    assert tensor[1:3].any()


@pytest.mark.parametrize("box", [Box((0,), (3,)), Box((2, 0), (3, 1)), Box((-1, 0), (1, 1))])
def test_a_box_outside_of_the_tensor_is_refused(box: Box):
    _, deferred = _ordinary_and_deferred(lambda: torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"within a tensor of shape \(4, 4\)"):
        read(deferred, box)


def test_what_goes_on_around_a_read_does_not_matter():
    def make() -> Tensor:
        return torch.outer(torch.arange(20.0), torch.rand(10)) @ torch.rand(10, 5)

    ordinary, deferred = _ordinary_and_deferred(make)
    with torch.device("meta"), torch.autocast("cpu"), torch.inference_mode():
        part, whole = read(deferred, Box((3, 0), (4, 5))), read(deferred)
    assert torch.equal(part, ordinary[3:7])
    assert torch.equal(whole, ordinary)


def test_what_goes_on_around_a_construction_is_what_it_usually_is():
    def make() -> Tensor:
        return torch.rand(8, 8) @ torch.rand(8, 8)

    with torch.autocast("cpu"), torch.device("cpu"):
        ordinary, deferred = _ordinary_and_deferred(make)
    assert deferred.dtype is torch.bfloat16
    assert torch.equal(read(deferred), ordinary)
