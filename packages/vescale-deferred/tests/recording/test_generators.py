import torch

from vescale_deferred._recording.generators import marker_state, marker_value


def test_a_marker_can_be_set_read_and_told_from_a_real_state():
    generator = torch.Generator().manual_seed(12)
    torch.empty(3).normal_(generator=generator)
    assert marker_value(generator.get_state()) is None
    generator.set_state(marker_state(generator.get_state(), 77))
    assert marker_value(generator.get_state()) == 77
    assert generator.initial_seed() == 12
    generator.manual_seed(3)
    assert marker_value(generator.get_state()) is None
