"""A process that was seeded differently draws what another one recorded."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_deferred import (
    deferred_init,
    fingerprint,
    fingerprints,
    materialize,
    read,
    recorded_draws,
    replace_draws,
)
from vescale_dtensor import Box

from .emulated_cuda import DEVICE, default_generator, install


class _Net(nn.Module):
    def __init__(self, *, std: float = 0.02, width: int = 10) -> None:
        super().__init__()
        self.up = nn.Linear(20, width)
        nn.init.trunc_normal_(self.up.weight, std=std)
        # Few normals are drawn in pairs, of which one is left.
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("order", torch.rand(7))
        self.attribute = torch.rand(3)


def _seeded(seed: int, num_draws: int = 0, **changes: Any) -> _Net:
    torch.manual_seed(seed)
    torch.randn(num_draws)
    return deferred_init(_Net, **changes)


def _sent(draws: Any) -> Any:
    file = io.BytesIO()
    torch.save(draws, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("num_draws", [0, 1, 700])
def test_another_process_has_the_bits_of_the_one_that_recorded(num_draws: int) -> None:
    expected = materialize(_seeded(1))
    own = _seeded(2, num_draws)
    replace_draws(own, _sent(recorded_draws(_seeded(1))))
    assert fingerprint(own) == fingerprint(_seeded(1))
    rows = Box(offset=(3, 0), shape=(4, 20))
    assert torch.equal(read(own.up.weight, rows), expected.up.weight[3:7])
    materialize(own)
    for mine, theirs in zip(
        own.state_dict().values(), expected.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert torch.equal(own.attribute, expected.attribute)


def test_draws_on_a_gpu_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(100, 70, device=DEVICE), nn.Embedding(9, 5, device=DEVICE))

    def record(seed: int) -> nn.Module:
        default_generator.manual_seed(seed)
        return deferred_init(layers)

    for _ in install(monkeypatch):
        one, other = record(1), record(2)
        assert fingerprint(one) != fingerprint(other)
        replace_draws(other, recorded_draws(one))
        assert fingerprint(one) == fingerprint(other)
        for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(read(mine), read(theirs))


def test_tensors_that_a_constructor_brought_along_are_taken_over() -> None:
    def scaled(values: Tensor) -> nn.Module:
        layer = nn.Linear(3, 3)
        with torch.no_grad():
            layer.bias.copy_(values)
        return layer

    one = deferred_init(scaled, torch.tensor([1.0, 2.0, 3.0]))
    other = deferred_init(scaled, torch.tensor([4.0, 5.0, 6.0]))
    replace_draws(other, recorded_draws(one))
    assert read(dict(other.named_parameters())["bias"]).tolist() == [1.0, 2.0, 3.0]


def test_another_construction_stays_what_it_is_and_is_told_by_name() -> None:
    own = _seeded(2, std=0.3)
    replace_draws(own, recorded_draws(_seeded(2)))
    one, other = fingerprints(own), fingerprints(_seeded(2))
    assert [name for name in one if one[name] != other[name]] == ["up.weight"]
    longer = deferred_init(nn.Sequential, nn.Linear(3, 3), nn.Linear(3, 3))
    before = fingerprint(longer)
    replace_draws(longer, recorded_draws(_seeded(2)))
    assert fingerprint(longer) == before
