"""What ``verify`` says of bits, told by hand-made records of runs."""

from __future__ import annotations

import torch
from torch import Tensor

from vescale._verify.bits import same_micro_batches
from vescale._verify.record import Record
from vescale._verify.report import LevelResult

ONE, OFF = torch.ones(2), torch.ones(2) + torch.finfo().eps


def run(*, gradient: Tensor = ONE, norm: Tensor | None = None, parameter: Tensor = ONE) -> Record:
    """Two steps; the gradient of the second and both parameters are given."""
    return Record(
        losses=[ONE[0]] * 2,
        norms=[] if norm is None else [norm] * 2,
        gradients=[{"x": ONE}, {"x": gradient}],
        parameters=[{"x": parameter}] * 2,
    )


def judged(reference: Record, rank: Record, *, rounded: tuple[str, ...] = ()) -> LevelResult:
    return same_micro_batches("N3", reference, [reference, rank], rounded, "all")


def test_parameters_without_promised_bits_end_the_comparison() -> None:
    assert judged(run(), run()).text == "all"
    assert judged(run(), run(parameter=OFF)).status == "failed"
    assert judged(run(), run(parameter=OFF), rounded=("other",)).status == "passed"


def test_norms_that_are_rounded_otherwise_end_the_comparison() -> None:
    clipped = run(norm=ONE[0])
    assert judged(clipped, run(norm=ONE[0], parameter=OFF)).status == "failed"
    found = judged(clipped, run(norm=OFF[0], parameter=OFF, gradient=OFF))
    assert found.status == "passed"
    assert found.text == "gradients up to step 0, whose norm is added up over shards and rounded"
    # Only once the norms differ: before, gradients are compared.
    assert judged(clipped, run(norm=ONE[0], gradient=OFF)).status == "failed"
