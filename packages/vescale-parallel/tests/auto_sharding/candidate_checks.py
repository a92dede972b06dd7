"""What tests ask of the candidates that are found."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vescale_parallel._auto_sharding.find_candidates import Candidate, Candidates, find_candidates

from .families import output
from .masked_ranks import worst_error
from .permutation import change, matrices, randomize


def found(model: nn.Module, batch: Any, size: int = 2) -> Candidates:
    return find_candidates(model, batch, size)


def features(result: Candidates) -> list[Candidate]:
    return [cut for cut in result.chosen if cut.kind == "features"]


def only(result: Candidates) -> Candidate:
    [cut] = features(result)
    return cut


def reasons(result: Candidates, parameter: str) -> list[str]:
    return [reason for axis, reason in result.rejected if axis.startswith(parameter)]


def assert_certified(model: nn.Module, batch: Any, result: Candidates) -> None:
    """Permuting a cut axis in all its parameters changes nothing; in one alone it does."""
    randomize(model)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return output(model, batch) if isinstance(batch, dict) else model(batch)

    before = run()
    for cut in features(result):
        assert change(model, run, cut, cut.parameters, before) < 1e-9
        assert change(model, run, cut, matrices(model, cut)[:1], before) > 1e-3


def wrong(model: nn.Module, batch: torch.Tensor, cut: Candidate) -> float:
    """Return how far masked ranks are from one device."""
    randomize(model)
    return worst_error(model, lambda called: called(batch), cut)


def x(width: int = 8) -> torch.Tensor:
    return torch.randn(2, 5, width, generator=torch.Generator().manual_seed(1)).double()
