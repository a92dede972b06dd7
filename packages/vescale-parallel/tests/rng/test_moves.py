"""How far operators move the generator of the CPU, known without drawing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_dtensor.random import Point
from vescale_parallel._rng.forward_draws import UnknownDrawsError, draws_of_forward
from vescale_parallel._rng.moves import advanced
from vescale_parallel._rng.stage_passes import repeated
from vescale_parallel._trace.random_ops import drawn_into


class Does(nn.Module):
    """Calls a function on what it is given."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


KNOWN: dict[str, Callable[[Tensor], Any]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x[None, None], 0.3),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.3),
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x[None], 0.3),
    "no dropout": lambda x: F.dropout(x, 0.0),
    "rand": lambda x: torch.rand(3, 4),
    "rand of float64": lambda x: torch.rand(5, dtype=torch.float64),
    "rand like": torch.rand_like,
    "scalar": lambda x: torch.rand(()),
    "three normals": lambda x: torch.randn(3),
    "seventeen normals": lambda x: torch.randn(17),
    "transposed normals": lambda x: torch.randn_like(x.t()),
    "strided normals": lambda x: torch.empty(40, 2)[:, 0].normal_(),
    "integers": lambda x: torch.randint(10, (7,)),
    "large integers": lambda x: torch.randint(1 << 40, (7,)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "exponential": lambda x: torch.empty_like(x).exponential_(),
    "log normal": lambda x: torch.empty_like(x).log_normal_(),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "permutation": lambda x: torch.randperm(1000),
    "choice": lambda x: torch.multinomial(x.softmax(-1), 2),
    "choice with replacement": lambda x: torch.multinomial(x.softmax(-1), 3, replacement=True),
    "attention": lambda x: F.scaled_dot_product_attention(
        *(x[None, None],) * 3, dropout_p=0.2
    ),
    "rrelu that is not training": lambda x: F.rrelu(x),
}  # fmt: skip


def test_a_generator_of_its_own_is_refused() -> None:
    model = Does(lambda x: torch.rand(5, generator=torch.Generator()))
    with pytest.raises(ValueError, match=r"aten.rand.generator in '' draws from a generator of"):
        draws_of_forward(model, ((torch.zeros(2, 2),), {}), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", KNOWN)
def test_the_generator_ends_where_it_was_said_to(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(12, 9, dtype=dtype)
    model = Does(KNOWN[name])
    torch.manual_seed(3)
    torch.rand(600)  # most of a block of words
    before = torch.get_rng_state()
    found = draws_of_forward(model, ((x,), {}), ())
    assert torch.equal(torch.get_rng_state(), before), "a look draws nothing"
    for times in range(1, 4):
        model(x)
        end = repeated(Point.of(before), found.total, times)
        assert torch.equal(end.state(), torch.get_rng_state())
        assert end.may_be_of(torch.get_rng_state())


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: torch.poisson(x.exp()), "aten.poisson"),
        (lambda x: F.rrelu(x, training=True), "rrelu"),
        (
            lambda x: torch.distributions.Gamma(x.exp(), x.exp(), validate_args=False).rsample(),
            "gamma",
        ),
    ],
)
def test_what_depends_on_values_is_named(function: Callable[[Tensor], Any], operator: str) -> None:
    with pytest.raises(UnknownDrawsError, match=rf"{operator}.* draws, in '', may depend"):
        draws_of_forward(Does(function), ((torch.randn(12, 9),), {}), ())


def test_a_forward_that_needs_values_is_named() -> None:
    def looks(x: Tensor) -> Tensor:
        return F.dropout(x) if x.mean() > 0 else x

    with pytest.raises(UnknownDrawsError, match="does not run on shapes alone: in module ''"):
        draws_of_forward(Does(looks), ((torch.randn(12, 9),), {}), ())


def test_integers_are_drawn_into_integers() -> None:
    *_, out = drawn_into(torch.ops.aten.randint.default, (10, [7]), {})
    assert out.dtype == torch.int64


class Block(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p, self.linear = p, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), self.p) * torch.rand(3).sum()


@pytest.mark.parametrize("chances", [(0.1,) * 6, (0.0, 0.1, 0.0, 0.1, 0.2, 0.3)])
def test_moves_are_between_the_borders_of_modules(chances: tuple[float, ...]) -> None:
    model = nn.Sequential(nn.Dropout(0.1), *map(Block, chances), nn.Dropout(0.2))
    names = [str(index) for index in range(1, 7)]
    x = torch.randn(8, 4)
    found = draws_of_forward(model, ((x,), {}), names)
    assert [*found.borders] == [(name, kind) for name in names for kind in ("enter", "leave")]
    point = Point.of(torch.get_rng_state())
    for layer, moves in zip(model, _by_layer(found.moves), strict=True):
        x = layer(x)
        point = advanced(point, moves)
        assert torch.equal(point.state(), torch.get_rng_state())


def _by_layer(moves: Any) -> list[Any]:
    return [moves[0], *moves[1:-1:2], moves[-1]]
