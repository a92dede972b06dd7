import random

import pytest
import torch

from vescale_deferred._evaluation.strided_overlap import NotSliceable, overlap, select
from vescale_dtensor.random import Window

_STORAGE = torch.arange(240, dtype=torch.float32)


def _view(generator: random.Random) -> torch.Tensor:
    """Return a random view of the storage: reshaped, sliced, permuted."""
    shape = generator.choice([(240,), (12, 20), (4, 3, 20), (2, 6, 5, 4)])
    tensor = _STORAGE.view(shape)
    for dim, size in enumerate(shape):
        low, high = sorted(generator.choices(range(size + 1), k=2))
        tensor = tensor.narrow(dim, low, high - low)
        if generator.random() < 0.2:
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
    if generator.random() < 0.3:
        tensor = tensor.permute(*generator.sample(range(tensor.dim()), tensor.dim()))
    return tensor


def test_an_overlap_holds_the_elements_that_both_windows_have():
    generator = random.Random(1)
    num_compared = 0
    for _ in range(3000):
        first, second = _view(generator), _view(generator)
        common = sorted({*first.flatten().tolist()} & {*second.flatten().tolist()})
        try:
            shared = overlap(Window.of(first), Window.of(second))
        except NotSliceable:
            continue
        num_compared += 1
        if shared is None:
            assert not common
            continue
        storage = _STORAGE.untyped_storage()
        in_first = select(Window.of(first), shared.in_first).on(storage)
        in_second = select(Window.of(second), shared.in_second).on(storage)
        assert torch.equal(in_first, in_second)
        assert sorted(in_first.flatten().tolist()) == common
        assert shared.is_all_of_second == (len(common) == second.numel())
    assert num_compared > 1000


def test_windows_of_different_types_are_not_compared():
    first = Window((4,), (1,), 0, torch.float32)
    with pytest.raises(NotSliceable):
        overlap(first, Window((4,), (1,), 0, torch.int32))


def test_ranges_that_cross_the_end_of_a_row_are_not_sliceable():
    with pytest.raises(NotSliceable):
        overlap(Window.of(_STORAGE.view(12, 20)), Window.of(_STORAGE[5:50]))
