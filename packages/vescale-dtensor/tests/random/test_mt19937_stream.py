import pytest
import torch

from vescale_dtensor.random._mt19937_jump import characteristic_polynomial, power_of_x
from vescale_dtensor.random._mt19937_stream import Point, Stream, draws_between, state_before


def _generator(seed: int = 5, num_draws: int = 0) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    _draw(generator, num_draws)
    return generator


def _draw(generator: torch.Generator, num_draws: int) -> torch.Tensor:
    return torch.empty(num_draws, dtype=torch.int32).random_(generator=generator)


def _next_words(state: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    return _draw(generator, 2000)


def test_the_characteristic_polynomial_annihilates_the_words_of_the_generator():
    generator = _generator(num_draws=624)
    blocks: list[torch.Tensor] = []
    for _ in range(34):
        blocks.append(generator.get_state()[24:5016].view(torch.int64))
        _draw(generator, 624)
    words = torch.cat(blocks)
    p = characteristic_polynomial()
    total = torch.zeros(600, dtype=torch.int64)
    for exponent in range(p.bit_length()):
        if p >> exponent & 1:
            total ^= words[exponent : exponent + 600]
    assert p.bit_length() == 19938
    assert not total.any()


def test_powers_of_x_add_their_exponents():
    a, b = 123_456, 7
    shifted = power_of_x(a)
    for _ in range(b):
        shifted <<= 1
        if shifted >> 19937:
            shifted ^= characteristic_polynomial()
    assert shifted == power_of_x(a + b)


@pytest.mark.parametrize("drawn_before", [0, 1, 300, 623, 624, 625, 10_000])
@pytest.mark.parametrize("distance", [0, 1, 15, 623, 624, 625, 1248, 5000, 100_000])
def test_a_state_of_a_stream_draws_what_drawing_would_have_drawn(drawn_before: int, distance: int):
    generator = _generator(num_draws=drawn_before)
    stream = Stream(generator.get_state())
    _draw(generator, distance)
    assert torch.equal(stream.state(distance), generator.get_state())


@pytest.mark.parametrize("drawn_before", [0, 100])
def test_a_jump_ends_where_drawing_ends(drawn_before: int):
    distance = 3_000_017
    generator = _generator(num_draws=drawn_before)
    stream = Stream(generator.get_state())
    _draw(generator, distance)
    assert torch.equal(stream.state(distance), generator.get_state())


def test_two_jumps_end_where_one_jump_ends():
    a, b = 10**12 + 3, 10**11 + 11
    state = _generator(num_draws=700).get_state()
    one = Stream(state)
    two = Stream(state)
    two.state(a)
    assert torch.equal(_next_words(one.state(a + b)), _next_words(two.state(a + b)))


def test_a_stream_can_be_read_backwards():
    state = _generator().get_state()
    stream = Stream(state)
    stream.state(5_000_000)
    assert torch.equal(
        _next_words(stream.state(2_500_000)), _next_words(Stream(state).state(2_500_000))
    )


def test_a_point_keeps_the_spare_normal():
    generator = _generator()
    torch.empty(3).normal_(generator=generator)
    point = Point.of(generator.get_state())
    expected = torch.empty(5).normal_(generator=generator)
    generator.set_state(point.state())
    assert torch.equal(torch.empty(5).normal_(generator=generator), expected)


@pytest.mark.parametrize("num_draws", [0, 1, 100, 623, 624])
def test_draws_between_counts_words(num_draws: int):
    generator = _generator(num_draws=50)
    before = generator.get_state()
    _draw(generator, num_draws)
    assert draws_between(before, generator.get_state()) == num_draws


def test_a_state_can_be_made_that_draws_given_words():
    words = [0, 1, 2**32 - 1, 0xDEADBEEF, 1132489760]
    generator = torch.Generator()
    generator.set_state(state_before(words))
    assert _draw(generator, 5).tolist() == [word % 2**31 for word in words]
