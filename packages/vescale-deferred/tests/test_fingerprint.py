"""Ranks that recorded different things find out by comparing one string."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_deferred import deferred_init, fingerprint, materialize, read, skip_init


class _Net(nn.Module):
    def __init__(
        self,
        *,
        std: float = 0.02,
        draws: int = 0,
        table: Tensor | None = None,
        is_tied: bool = True,
        is_frozen: bool = False,
        generator_seed: int = 3,
    ) -> None:
        super().__init__()
        self.up = nn.Linear(20, 10)
        torch.rand(draws)
        self.down = nn.Linear(20, 10)
        if is_tied:
            self.down.weight = self.up.weight
        nn.init.normal_(self.up.weight, std=std)
        nn.init.normal_(self.down.bias, generator=torch.Generator().manual_seed(generator_seed))
        self.up.bias.requires_grad_(not is_frozen)
        self.register_buffer("table", torch.ones(4) if table is None else table * 2)
        self.attribute = torch.rand(3)


def _record(seed: int = 0, **changes: Any) -> _Net:
    torch.manual_seed(seed)
    return deferred_init(_Net, **changes)


def test_the_same_construction_has_the_same_fingerprint():
    first = _record()
    deferred_init(nn.Linear, 5, 5)  # whatever else this process has recorded
    second = _record()
    state = torch.get_rng_state()
    assert fingerprint(first) == fingerprint(second) == fingerprint(first)
    assert torch.equal(torch.get_rng_state(), state)


def test_reading_does_not_change_the_fingerprint():
    net = _record()
    expected = fingerprint(net)
    read(net.up.weight)
    assert fingerprint(net) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"std": 0.03},
        {"draws": 1},
        {"table": torch.ones(4)},
        {"table": torch.tensor([1.0, 1.0, 1.0, 2.0])},
        {"is_tied": False},
        {"is_frozen": True},
        {"generator_seed": 4},
    ],
    ids=str,
)
def test_another_construction_has_another_fingerprint(change: dict[str, Any]):
    expected = fingerprint(_record())
    assert fingerprint(_record(**change)) != expected


def _write(net: Any) -> None:
    with torch.no_grad():
        net.down.bias.add_(1)


@pytest.mark.parametrize("change", [nn.Module.half, _write, skip_init, nn.Module.requires_grad_])
def test_what_happens_after_construction_counts(change: Callable[[nn.Module], object]):
    net = _record(is_frozen=True)
    before = fingerprint(net)
    change(net)
    assert fingerprint(net) != before


def test_real_tensors_count_with_their_values():
    net = materialize(_record())
    before = fingerprint(net)
    assert fingerprint(materialize(_record())) == before
    with torch.no_grad():
        net.up.weight[3, 4] += 1e-3
    assert fingerprint(net) != before


_PRINT = """
import torch
from torch import nn
from vescale_deferred import deferred_init, fingerprint
torch.manual_seed({seed})
print(fingerprint(deferred_init(nn.TransformerEncoderLayer, 16, 2, 32)))
"""


@pytest.mark.slow
def test_another_process_has_the_same_fingerprint():
    torch.manual_seed(8)
    expected = fingerprint(deferred_init(nn.TransformerEncoderLayer, 16, 2, 32))
    for seed, is_same in ((8, True), (9, False)):
        code = _PRINT.format(seed=seed)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (done.stdout.strip() == expected) is is_same
