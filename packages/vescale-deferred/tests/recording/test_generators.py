"""Generators in constructors, against ordinary construction."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vescale_deferred import deferred_init, materialize
from vescale_deferred._recording.generators import marker_state, marker_value

from .modules import holder

Check = Callable[[Callable[[], nn.Module]], Any]


def test_a_marker_can_be_set_read_and_told_from_a_real_state():
    generator = torch.Generator().manual_seed(12)
    torch.empty(3).normal_(generator=generator)
    assert marker_value(generator.get_state()) is None
    generator.set_state(marker_state(generator.get_state(), 77))
    assert marker_value(generator.get_state()) == 77
    assert generator.initial_seed() == 12
    generator.manual_seed(3)
    assert marker_value(generator.get_state()) is None


def test_seeding_and_forking_inside_a_constructor_is_followed(same_as_ordinary: Check):
    def factory() -> Any:
        a = torch.rand(4)
        torch.manual_seed(9)
        b = torch.randn(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            c = torch.rand(5)
        state = torch.get_rng_state()
        d = torch.randn(5)
        torch.set_rng_state(state)
        return holder(a=a, b=b, c=c, d=d, e=torch.randn(5), f=torch.rand(20))

    same_as_ordinary(factory)


def test_explicit_generators_are_followed_and_left_in_their_ordinary_state(
    same_as_ordinary: Check,
):
    ends: list[Tensor] = []
    generator = torch.Generator()

    def factory() -> Any:
        generator.manual_seed(4)
        module = holder(
            a=torch.rand(4, generator=generator),
            b=torch.randn(40, generator=generator),
            c=torch.rand(3),
            d=torch.empty(5).normal_(generator=generator),
            e=torch.randperm(9, generator=generator),
        )
        return module

    factory()
    ends.append(generator.get_state())
    deferred_init(factory)
    ends.append(generator.get_state())
    assert torch.equal(*ends)
    same_as_ordinary(factory)


def test_random_operators_whose_draws_are_not_known_are_exact(same_as_ordinary: Check):
    same_as_ordinary(
        lambda: holder(
            a=torch.randperm(10),
            b=torch.multinomial(torch.rand(10), 3),
            c=torch.bernoulli(torch.rand(5)),
            d=torch.empty(40).exponential_(),
            e=torch.normal(torch.rand(40), torch.ones(40)),
            f=torch.view_as_real(torch.randn(9, dtype=torch.complex64)),
            g=nn.functional.dropout(torch.ones(20)),
            h=torch.poisson(torch.rand(4) * 5),
            i=torch.randn(5),
        )
    )


def test_a_generator_state_kept_by_a_module_is_the_ordinary_one():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(700))
            self.state = torch.get_rng_state()

    torch.manual_seed(2)
    expected = Net()
    torch.manual_seed(2)
    assert torch.equal(deferred_init(Net).state, expected.state)


def test_the_generator_is_in_its_ordinary_state_even_if_it_drew_after_a_jump():
    def factory() -> Any:
        module = nn.Linear(2000, 2000)
        module.register_buffer("order", torch.randperm(5))
        return module

    torch.manual_seed(2)
    expected = factory()
    end = torch.get_rng_state()
    torch.manual_seed(2)
    module = deferred_init(factory)
    assert torch.equal(torch.get_rng_state(), end)
    assert torch.equal(materialize(module).order, expected.order)
