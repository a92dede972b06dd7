"""Any run and any block of a random tensor, against drawing all of it."""

import torch
from hypothesis import given, settings, strategies as st

from vescale_dtensor.random._cpu_shard import RandomTensor
from vescale_dtensor.random._draw_rules import Draws, Fill, draws
from vescale_dtensor.random._mt19937_stream import Point
from vescale_dtensor.random._strided_view import Window

_FILLS = (
    (Fill("normal_", (0.5, 2.0)), torch.float32),
    (Fill("normal_", (0.0, 1.0)), torch.float64),
    (Fill("normal_", (0.0, 1.0)), torch.bfloat16),
    (Fill("uniform_", (-1.0, 1.0)), torch.float32),
    (Fill("uniform_", (0.0, 1.0)), torch.float64),
    (Fill("random_", (0, 1 << 40)), torch.int64),
)


def _draws(fill: Fill, tensor: torch.Tensor, point: Point) -> Draws:
    found = draws(fill, Window.of(tensor), point)
    assert found is not None
    assert found[0] is not None
    return found[0]


@settings(max_examples=150)
@given(
    st.sampled_from(_FILLS),
    st.integers(0, 2000),
    st.integers(16, 3000),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=4),
)
def test_runs_of_a_random_tensor_can_be_drawn_in_any_order(
    fill_and_dtype: tuple[Fill, torch.dtype],
    drawn_before: int,
    numel: int,
    runs: list[tuple[int, int]],
):
    fill, dtype = fill_and_dtype
    generator = torch.Generator()
    generator.manual_seed(3)
    torch.empty(drawn_before, dtype=torch.uint8).random_(generator=generator)
    point = Point.of(generator.get_state())
    whole = torch.empty(numel, dtype=dtype)
    fill(whole, generator)
    tensor = RandomTensor(numel, _draws(fill, whole, point), point)
    for start, length in runs:
        start %= numel
        length = min(length, numel - start)
        out = torch.empty(length, dtype=dtype)
        tensor.draw(Window((length,), (1,), start, dtype), out)
        assert torch.equal(out, whole[start : start + length])


def test_blocks_far_apart_are_drawn_without_what_lies_between():
    fill = Fill("normal_", (0.0, 1.0))
    generator = torch.Generator()
    generator.manual_seed(3)
    point = Point.of(generator.get_state())
    whole = torch.empty(6, 1_200_007)
    fill(whole, generator)
    tensor = RandomTensor(whole.numel(), _draws(fill, whole, point), point)
    for rows, columns in ((slice(0, 6, 5), slice(3, 40)), (slice(2, 6), slice(1_200_000, None))):
        expected = whole[rows, columns]
        out = torch.empty(expected.shape)
        tensor.draw(Window.of(expected), out)
        assert torch.equal(out, expected)
