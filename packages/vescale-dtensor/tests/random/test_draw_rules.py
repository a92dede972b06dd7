"""The number of words each random operator draws, against torch itself."""

import pytest
import torch

from vescale_dtensor.random._draw_rules import Fill, draws
from vescale_dtensor.random._mt19937_stream import Point
from vescale_dtensor.random._strided_view import Window

_FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
_FILLS = [
    *((Fill("uniform_", (-1.0, 2.0)), dtype) for dtype in _FLOATS),
    *((Fill("normal_", (0.5, 2.0)), dtype) for dtype in _FLOATS),
    *((Fill("random_", (0, 10)), dtype) for dtype in (torch.int64, torch.int32, torch.uint8)),
    (Fill("random_", (0, 2**40)), torch.int64),
    (Fill("random_", ()), torch.int64),
    (Fill("random_", ()), torch.float32),
]


def _check(fill: Fill, tensor: torch.Tensor, num_spares: int) -> None:
    generator = torch.Generator()
    generator.manual_seed(1)
    torch.empty(num_spares).normal_(generator=generator)
    point = Point.of(generator.get_state())
    found = draws(fill, Window.of(tensor), point)
    fill(tensor, generator)
    assert found is not None
    assert torch.equal(found[1].state(), generator.get_state())


@pytest.mark.parametrize("numel", [0, 1, 2, 3, 15, 16, 17, 31, 32, 100, 1000, 1001])
@pytest.mark.parametrize(("fill", "dtype"), _FILLS)
def test_draws_leave_the_generator_where_torch_leaves_it(
    fill: Fill, dtype: torch.dtype, numel: int
):
    for num_spares in (0, 1):
        _check(fill, torch.empty(numel, dtype=dtype), num_spares)


@pytest.mark.parametrize(("fill", "dtype"), _FILLS)
def test_draws_into_strided_tensors_are_counted_too(fill: Fill, dtype: torch.dtype):
    for num_spares in (0, 1):
        _check(fill, torch.empty(7, 6, dtype=dtype).t(), num_spares)
        _check(fill, torch.empty(7, 12, dtype=dtype)[:, ::2], num_spares)


def test_what_cannot_be_counted_is_not_guessed():
    point = Point.of(torch.Generator().get_state())
    window = Window.of(torch.empty(4, dtype=torch.complex64))
    assert draws(Fill("normal_", (0.0, 1.0)), window, point) is None
