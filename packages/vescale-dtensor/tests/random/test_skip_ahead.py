"""Moving generators past words without drawing, against generators that draw."""

import pytest
import torch
from torch import Generator, Tensor
from torch.distributed.tensor import Shard

from vescale_dtensor import local_boxes
from vescale_dtensor.random import Fill, Point, RandomTensor, Window, draw_part, draws
from vescale_dtensor.random._mt19937_jump import NUM_WORDS
from vescale_dtensor.random._mt19937_stream import state_before, words_of
from vescale_dtensor.random._skip_ahead import Walk, compiled_walk, discard, words_ahead

_FILLS = [Fill("normal_", (0.0, 0.02)), Fill("uniform_", (-1.0, 2.0)), Fill("random_", ())]
_DTYPES = [torch.float32, torch.bfloat16, torch.float64]


@pytest.fixture
def walk() -> Walk:
    found = compiled_walk()
    assert found is not None
    return found


@pytest.mark.parametrize("distance", [624, 625, 1248, 2497, 100_000])
@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 700])
def test_words_ahead_are_those_of_generators_that_draw(walk: Walk, distance: int, drawn: int):
    generator = Generator().manual_seed(3)
    discard(generator, drawn)
    words, end = words_ahead(walk, generator.get_state(), distance, (3, NUM_WORDS))
    shorter, same_end = words_ahead(walk, generator.get_state(), distance, (3, 100))
    assert torch.equal(shorter, words[:, :100])
    assert torch.equal(same_end, end)
    for row in words:
        state = state_before(())
        words_of(state).copy_(row)
        expected = torch.rand(2000, generator=generator.clone_state())
        assert torch.equal(torch.rand(2000, generator=_at(state)), expected)
        discard(generator, distance)
    assert torch.equal(end, generator.get_state())


def _at(state: Tensor) -> Generator:
    generator = Generator()
    generator.set_state(state)
    return generator


@pytest.fixture
def compiled_for_all(walk: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vescale_dtensor.random._cpu_shard._COMPILED_NUM_DRAWS", 0)


def _drawn(fill: Fill, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Generator]:
    generator = Generator().manual_seed(5)
    whole = torch.empty(shape, dtype=dtype)
    fill(whole, generator)
    return whole, generator


@pytest.mark.usefixtures("compiled_for_all")
@pytest.mark.parametrize("fill", _FILLS, ids=lambda fill: fill.method)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(300, 160), (500, 51), (20, 30, 64), (6, 20_032)], ids=str)
def test_column_shards_are_those_of_one_device(
    fill: Fill, dtype: torch.dtype, shape: tuple[int, ...]
):
    whole, after = _drawn(fill, shape, dtype)
    for rank in range(4):
        boxes = local_boxes(shape, (4,), (rank,), (Shard(len(shape) - 1),))
        part = torch.empty_like(whole[boxes[0].box.slices].contiguous())
        generator = Generator().manual_seed(5)
        draw_part(fill, window=Window.of(whole), boxes=boxes, out=part, generator=generator)
        assert torch.equal(part, whole[boxes[0].box.slices])
        assert torch.equal(generator.get_state(), after.get_state())


@pytest.mark.usefixtures("compiled_for_all")
def test_rows_and_runs_take_turns():
    fill = _FILLS[0]
    whole, _ = _drawn(fill, (600, 64), torch.float32)
    point = Point.of(Generator().manual_seed(5).get_state())
    found = draws(fill, Window.of(whole), point)
    assert found is not None
    assert found[0] is not None
    tensor = RandomTensor(whole.numel(), found[0], point)
    for part in (whole[300:, 16:32], whole[3:5], whole[:, 5:9], whole[:400, :48], whole[7]):
        out = torch.empty(part.shape)
        tensor.draw(Window.of(part), out)
        assert torch.equal(out, part)


def test_without_the_extra_shards_are_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vescale_dtensor.random._cpu_shard._COMPILED_NUM_DRAWS", 0)
    monkeypatch.setattr("vescale_dtensor.random._cpu_shard.compiled_walk", lambda: None)
    whole, _ = _drawn(_FILLS[0], (20, 40_000), torch.float32)
    part = torch.empty(20, 10_000)
    boxes = local_boxes(whole.shape, (4,), (2,), (Shard(1),))
    generator = Generator().manual_seed(5)
    draw_part(_FILLS[0], window=Window.of(whole), boxes=boxes, out=part, generator=generator)
    assert torch.equal(part, whole[:, 20_000:30_000])
