"""What is said about torch's random operators, against the operators."""

from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_dtensor import local_boxes
from vescale_dtensor.random import Window, draw_part, random_operator

_aten = torch.ops.aten
_GENERATOR = torch.default_generator


def _by_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: Tensor) -> Any:
    """Do what the operator does, the numbers drawn for the whole tensor as one part of it."""
    found = random_operator(func, args)
    assert found is not None
    out = torch.empty_like(like, dtype=found.dtype)
    draw_part(
        found.fill,
        window=Window.of(out),
        boxes=local_boxes(out.shape, (), (), ()),
        out=out,
        generator=kwargs.get("generator"),
    )
    return out if found.finish is None else found.finish(out, args)


def _in_place(name: str, overload: str, *parameters: Any) -> tuple[Any, tuple[Any, ...]]:
    return getattr(getattr(_aten, name), overload), (torch.zeros(40, 7), *parameters)


_P = torch.linspace(0, 1, 280).view(40, 7)
_SIZE = [150, 200]
_GENERATED = {"generator": _GENERATOR}
_CALLS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *(
        (*_in_place(name, overload, *parameters), {})
        for name, overload, parameters in [
            ("uniform_", "default", ()),
            ("uniform_", "default", (-1.0,)),
            ("uniform_", "default", (-1.0, 2.0)),
            ("normal_", "default", ()),
            ("normal_", "default", (1.0, 2.0)),
            ("random_", "default", ()),
            ("random_", "to", (9,)),
            ("random_", "from", (2, 9)),
            ("random_", "from", (-(2**63), None)),
            ("bernoulli_", "float", ()),
            ("bernoulli_", "float", (0.2,)),
            ("bernoulli_", "Tensor", (_P,)),
            ("bernoulli_", "Tensor", (_P.double(),)),
            ("bernoulli_", "Tensor", (_P.bfloat16(),)),
            ("bernoulli_", "Tensor", (torch.tensor(0.4),)),
            ("exponential_", "default", ()),
            ("exponential_", "default", (2.0,)),
            ("log_normal_", "default", ()),
            ("log_normal_", "default", (0.0, 0.5)),
            ("cauchy_", "default", ()),
            ("cauchy_", "default", (1.0, 0.5)),
            ("geometric_", "default", (0.3,)),
        ]
    ),
    (_aten.bernoulli.default, (_P,), {}),
    (_aten.bernoulli.default, (_P.double(),), {}),
    (_aten.bernoulli.default, (_P.half(),), {}),
    (_aten.bernoulli.p, (_P, 0.25), {}),
    (_aten.bernoulli.Tensor, (torch.zeros(40, 7, dtype=torch.int64), _P), {}),
    (_aten.normal.Tensor_float, (_P,), {}),
    (_aten.normal.Tensor_float, (_P, 2.0), {}),
    (_aten.normal.float_Tensor, (1.5, _P), {}),
    (_aten.normal.Tensor_Tensor, (_P, _P.t().contiguous().t()), {}),
    (_aten.normal.float_float, (1.5, 2.0, _SIZE), {}),
    (_aten.native_dropout.default, (_P, 0.3, True), {}),
    (_aten.native_dropout.default, (_P.double(), 0.3, True), {}),
    (_aten.native_dropout.default, (_P.bfloat16(), 0.3, None), {}),
    (_aten.native_dropout.default, (_P, 1.0, True), {}),
    (_aten.rand.default, (_SIZE,), {"dtype": torch.float64}),
    (_aten.rand.generator, (_SIZE,), _GENERATED),
    (_aten.randn.default, (_SIZE,), {}),
    (_aten.randn.generator, (_SIZE,), _GENERATED),
    (_aten.randn.default, (_SIZE,), {"dtype": torch.complex64}),
    (_aten.randint.default, (9, _SIZE), {}),
    (_aten.randint.generator, (9, _SIZE), _GENERATED),
    (_aten.randint.low, (2, 9, _SIZE), {}),
    (_aten.randint.low_generator, (2, 9, _SIZE), _GENERATED),
    (_aten.rand_like.default, (_P,), {"dtype": torch.bfloat16}),
    (_aten.rand_like.generator, (_P,), _GENERATED),
    (_aten.rand_like.default, (torch.empty(150, 200).t(),), {}),
    (_aten.randn_like.default, (torch.empty(150, 200).t(),), {}),
    (_aten.randn_like.generator, (_P,), _GENERATED),
    (_aten.randint_like.default, (_P, 9), {}),
    (_aten.randint_like.generator, (_P, 9), _GENERATED),
    (_aten.randint_like.low_dtype, (_P, 2, 9), {}),
    (_aten.randint_like.low_generator_dtype, (_P, 2, 9), _GENERATED),
]


def _name(argument: Any) -> str:
    return str(argument) if callable(argument) else "*"


@pytest.mark.parametrize(("func", "args", "kwargs"), _CALLS, ids=_name)
def test_an_operator_is_what_is_drawn_and_how_it_ends(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        torch.randn(3)
        start = torch.get_rng_state()
        expected = func(*args, **kwargs)
        end = torch.get_rng_state()
        torch.set_rng_state(start)
        got = _by_parts(func, args, kwargs, _as_tuple(expected)[0])
        assert torch.equal(torch.get_rng_state(), end)
    for one, other in zip(_as_tuple(got), _as_tuple(expected), strict=True):
        assert torch.equal(one.to(other.dtype), other)


def _as_tuple(values: Any) -> tuple[Tensor, ...]:
    return values if isinstance(values, tuple) else (values,)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (_aten.native_dropout.default, (_P, 0.3, False)),
        (_aten.randperm.default, (9,)),
        (_aten.multinomial.default, (_P, 2)),
        (_aten.poisson.default, (_P,)),
        (_aten.add.Tensor, (_P, _P)),
        (_aten.zeros_like.default, (_P,)),
    ],
    ids=_name,
)
def test_operators_that_draw_otherwise_or_not_at_all_are_left_alone(
    func: Any, args: tuple[Any, ...]
):
    assert random_operator(func, args) is None


def test_what_other_devices_draw_with_kernels_of_their_own_is_left_alone():
    for func, args in (
        (_aten.bernoulli.default, (_P,)),
        (_aten.bernoulli_.Tensor, (_P, _P)),
        (_aten.native_dropout.default, (_P, 0.3, True)),
    ):
        assert random_operator(func, args, device_type="cuda") is None
    assert random_operator(_aten.bernoulli_.float, (_P,), device_type="cuda") is not None
    assert random_operator(_aten.normal.Tensor_float, (_P,), device_type="cuda") is not None
