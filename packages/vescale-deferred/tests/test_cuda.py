"""Construction on CUDA: emulated on the CPU, and on a GPU where there is one."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_deferred import (
    DeferredWarning,
    deferred_init,
    fingerprint,
    is_deferred,
    materialize,
    read,
)
from vescale_dtensor import Box

from .emulated_cuda import DEVICE, Ordinarily, default_generator, install

Check = Callable[..., Any]
Device = torch.device | str


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, same_as_ordinary: Check) -> Iterator[Check]:
    """Compare with ordinary construction on the emulated device."""
    for module in install(monkeypatch):
        yield partial(same_as_ordinary, accelerator=module, ordinarily=Ordinarily())


def _holder(**tensors: Tensor) -> Any:
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def _factories(device: Device) -> Any:
    like = torch.empty(7, 300, device=device)
    return _holder(
        rand=torch.rand(70, 61, device=device),
        randn=torch.randn(70, 61, device=device),
        randint=torch.randint(3, 90, (70, 61), device=device),
        randint_to=torch.randint(90, (5,), device=device),
        rounded=torch.randn(70, 61, dtype=torch.bfloat16, device=device),
        doubles=torch.rand(70, 61, dtype=torch.float64, device=device),
        like=torch.rand_like(like),
        normal_like=torch.randn_like(like),
        elsewhere=torch.randn(30, 40),
        scalar=torch.rand((), device=device),
    )


def _methods(device: Device) -> Any:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, device=device)

    part = torch.zeros(60, 50, device=device)
    part[5:40].normal_()
    part[:, 7:31].uniform_(2, 3)
    return _holder(
        uniform=empty(70, 61).uniform_(-1, 2.5),
        normal=empty(70, 61).normal_(0.5, 2),
        bernoulli=empty(70, 61).bernoulli_(0.3),
        transposed=empty(70, 61).t().uniform_(),
        part=part,
        scaled=empty(70, 61).normal_().mul_(0.3).clamp_(-0.2, 0.2),
        nothing=empty(4, 3)[:0].normal_(),
    )


def _initialisers(device: Device) -> Any:
    names = ("kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_")
    inits = {name: getattr(nn.init, name)(torch.empty(60, 70, device=device)) for name in names}
    return _holder(
        **inits,
        trunc_normal_=nn.init.trunc_normal_(torch.empty(60, 70, device=device), std=0.02),
    )


def _seeds(device: Device) -> Any:
    first = torch.rand(3000, device=device)
    torch.manual_seed(9)
    second = torch.rand(3000, device=device)
    with torch.random.fork_rng([0], device_type=torch.device(device).type):
        torch.manual_seed(8)
        forked = torch.randn(40, device=device)
    return _holder(a=first, b=second, c=forked, d=torch.rand(50, device=device), e=torch.rand(9))


def _in_a_context(device: Device) -> Any:
    with torch.device(device):
        return nn.Sequential(nn.Linear(40, 60), nn.Embedding(50, 20, 1), nn.LayerNorm(8))


_LAYERS: list[Callable[[Device], nn.Module]] = [
    lambda device: nn.Linear(100, 70, device=device),
    lambda device: nn.Embedding(90, 50, 3, device=device, dtype=torch.bfloat16),
    lambda device: nn.Conv2d(6, 40, 3, device=device),
    lambda device: nn.LSTM(20, 30, 2, device=device),
    lambda device: nn.MultiheadAttention(32, 2, device=device),
    lambda device: nn.BatchNorm1d(8, device=device),
    lambda device: nn.Linear(40, 30).to(device),
]
_FACTORIES = [_factories, _methods, _initialisers, _seeds, _in_a_context, *_LAYERS]


@pytest.mark.parametrize("make", _FACTORIES)
def test_modules_of_an_emulated_device_have_their_ordinary_values(
    make: Callable[[Device], nn.Module], emulated: Check
):
    emulated(lambda: make(DEVICE))


def _tiny_llama(device: Device) -> nn.Module:
    transformers: Any = import_module("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=130,
    )
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)


def test_a_llama_on_an_emulated_device_has_its_ordinary_values(emulated: Check):
    emulated(lambda: _tiny_llama(DEVICE))


def test_explicit_generators_of_an_emulated_device_are_followed(emulated: Check):
    generator = torch.Generator()

    def factory() -> nn.Module:
        generator.manual_seed(4)
        a = torch.rand(3000, device=DEVICE, generator=generator)
        b = torch.empty(40, device=DEVICE).normal_(generator=generator)
        return _holder(a=a, b=b, c=torch.rand(30, device=DEVICE))

    emulated(factory)
    end = generator.get_state()
    deferred_init(factory)
    assert torch.equal(generator.get_state(), end)


def test_tensors_of_another_device_say_where_they_are(emulated: Check):
    layer = deferred_init(nn.Linear, 4, 3, device=DEVICE)
    assert layer.weight.device == DEVICE
    assert "device='privateuseone'" in repr(layer.weight)


def test_seeds_of_an_emulated_device_are_in_the_fingerprint(emulated: Check):
    def record(seed: int) -> str:
        torch.manual_seed(seed)
        return fingerprint(deferred_init(nn.Linear, 4, 3, device=DEVICE))

    assert record(1) == record(1) != record(2)


def test_a_constructor_that_fails_leaves_the_generators_as_usual(emulated: Check):
    def factory() -> Any:
        torch.rand(5000, device=DEVICE)
        raise ValueError("mine")

    torch.manual_seed(3)
    start = default_generator.get_state()
    with Ordinarily(), pytest.raises(ValueError, match="mine"):
        factory()
    default_generator.set_state(start)
    # It runs once more, for real, to raise its own error.
    with Ordinarily(), pytest.raises(ValueError, match="mine"):
        deferred_init(factory)


def test_draws_that_are_not_known_are_made_at_once_and_say_so(emulated: Check):
    def factory() -> Any:
        generator = torch.Generator()
        return _holder(a=torch.empty(5, device=DEVICE).cauchy_(generator=generator))

    with pytest.warns(DeferredWarning, match=r"cauchy_ on privateuseone is not.*test_cuda.py"):
        assert is_deferred(deferred_init(factory).a)


def test_parts_are_drawn_without_the_whole(emulated: Check, monkeypatch: pytest.MonkeyPatch):
    module = deferred_init(lambda: _factories(DEVICE))

    def refuse(snapshots: object) -> None:
        raise AssertionError("evaluated whole")

    monkeypatch.setattr("vescale_deferred._evaluation.partial_replay.replay", refuse)
    for name, tensor in module.named_buffers():
        if tensor.dim() == 2:
            assert read(tensor, Box((3, 0), (2, 1))).shape == (2, 1), name


@pytest.mark.gpu
@pytest.mark.parametrize("make", [*_FACTORIES, _tiny_llama])
def test_modules_on_a_gpu_have_their_ordinary_values(
    make: Callable[[Device], nn.Module], same_as_ordinary: Check
):
    same_as_ordinary(lambda: make("cuda"), accelerator=torch.cuda)


@pytest.mark.gpu
def test_recurrent_layers_on_a_gpu_lay_their_weights_out_as_one_chunk():
    torch.manual_seed(0)
    ordinary = nn.LSTM(20, 30, 2, device="cuda")
    torch.manual_seed(0)
    layer = deferred_init(nn.LSTM, 20, 30, 2, device="cuda")
    assert is_deferred(layer)
    materialize(layer)
    x = torch.randn(5, 3, 20, device="cuda")
    # torch warns if they are not, which is an error here.
    assert torch.equal(layer(x)[0], ordinary(x)[0])


@pytest.mark.gpu
def test_large_tensors_on_a_gpu_have_their_ordinary_values(same_as_ordinary: Check):
    def factory() -> nn.Module:
        return _holder(
            a=torch.randn(3001, 2003, device="cuda"),
            b=torch.empty(2003, 3001, device="cuda").t().uniform_(-1, 1),
            c=nn.init.trunc_normal_(torch.empty(1500, 2003, device="cuda"), a=-1.0, b=1.0),
            d=torch.randn(4000, 1000, dtype=torch.bfloat16, device="cuda"),
        )

    same_as_ordinary(factory, accelerator=torch.cuda)


@pytest.mark.gpu
def test_explicit_generators_and_values_on_a_gpu_are_followed(same_as_ordinary: Check):
    generator = torch.Generator("cuda")

    def factory() -> nn.Module:
        generator.manual_seed(4)
        a = torch.rand(3000, device="cuda", generator=generator)
        size = int(torch.randint(3, 9, (), device="cuda"))
        drawn = torch.randn if torch.rand(4, device="cuda").sum() > 2 else torch.rand
        return _holder(a=a, b=torch.rand(size, device="cuda"), c=drawn(300, device="cuda"))

    same_as_ordinary(factory, accelerator=torch.cuda)
    end = generator.get_state()
    deferred_init(factory)
    assert torch.equal(generator.get_state(), end)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randperm(10, device="cuda"),
        lambda: nn.functional.dropout(torch.ones(20, device="cuda")),
        lambda: torch.bernoulli(torch.rand(20, device="cuda")),
    ],
)
def test_whole_draws_on_a_gpu_are_exact_and_say_that_they_are_made_at_once(
    draw: Callable[[], Tensor], same_as_ordinary: Check
):
    with pytest.warns(DeferredWarning, match=r"on cuda:0 is not deferred.*test_cuda.py"):
        same_as_ordinary(
            lambda: _holder(a=draw(), b=torch.rand(5, device="cuda")), accelerator=torch.cuda
        )


@pytest.mark.gpu
def test_deferred_modules_take_no_memory_of_a_gpu():
    deferred_init(nn.Linear, 64, 64, device="cuda")  # looks once at how the device draws
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    deferred_init(nn.Linear, 1 << 15, 1 << 15, device="cuda")  # 4 GiB
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    assert torch.cuda.memory_allocated() == before
