"""torch's brute-force judge of sharding rules, on the rules of this package.

Over all of torch's operator database, gradients included, the judge finds no rule wrong. What it
is not asked, because its own answer would be wrong:

- placements that torch does not have; parts of integers (it makes fractions of them), of half
  precision, and the largest of complex numbers;
- float32, where parts of a few thousand times the size of the values round by more than the 1e-5
  that it allows: float64 does not;
- infinities, whose parts are no numbers, what is near to one, and memory that nothing was written
  to;
- negated indices, which are out of bounds: operators on integers are looked at once, not twice.

It cannot test uneven cuts; test_opinfo.py does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial

from vescale_dtensor import emulate

from .sweep_cases import FIXED_SIZES, OPERATORS, UNDISPATCHED, sized
from .torch_judge import judge, why_not

if why_not:
    pytest.skip(why_not, allow_module_level=True)

from .judged import NUM_RANKS, AtenCall, Claim, claims_of, judged, judgment

# Those that the judge itself sets, so that cuts are even.
_SIZES = {"XS": 2, "S": 4, "M": 12, "L": 24}
_NAMES = """
    add addcmul addmm amax baddbmm bmm cat clamp cumsum diagonal div.no_rounding_mode expand
    flip gather index_select lerp logsumexp masked_fill matmul mean mul permute prod reshape
    scatter_add softmax sort split squeeze sum topk transpose tril where
    nn.functional.conv2d nn.functional.cross_entropy nn.functional.embedding nn.functional.gelu
    nn.functional.layer_norm nn.functional.linear
"""
SLICE = _NAMES.split()
_SKIPPED = {*judge.SKIP_OPS, *UNDISPATCHED, *FIXED_SIZES}


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with emulate(NUM_RANKS), sized(_SIZES):
        yield init_device_mesh("cpu", (NUM_RANKS,))


def test_the_judge_finds_a_rule_that_is_wrong(mesh: DeviceMesh) -> None:
    x = torch.arange(-4.0, 4.0)
    called = AtenCall(torch.ops.aten.relu.default, (x,), {}, x.relu())
    wrong = Claim((Partial(),), (Partial(),), torch.ops.aten.relu.default)
    assert len(judgment(called, [wrong], mesh).flagged) == 1
    factors = Claim((Partial("product"),), (Partial("product"),), torch.ops.aten.relu.default)
    assert len(judgment(called, [factors], mesh).flagged) == 1
    claims = claims_of(called, mesh)
    assert claims
    said = judgment(called, claims, mesh)
    assert said.right == len(claims)


@pytest.mark.by_day(
    "flip",
    "gather",
    "index_select",
    "masked_fill",
    "mean",
    "mul",
    "nn.functional.embedding",
    "nn.functional.gelu",
    "nn.functional.layer_norm",
    "scatter_add",
    "softmax",
    "sort",
    "sum",
    "topk",
    "tril",
    "where",
)
@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in OPERATORS if _name(op) in SLICE], ids=_name)
def test_the_judge_finds_no_rule_wrong(op: Any, mesh: DeviceMesh) -> None:
    said = judged(op, mesh, dtype=torch.float64, num_samples=2)
    assert said.right + said.untestable
    assert not said.flagged, "\n".join(said.flagged)


def test_the_slice_names_operators_of_the_database() -> None:
    assert set(SLICE) <= {_name(op) for op in OPERATORS}


# Some variants are a GPU's alone.
_JUDGED = [op for op in OPERATORS if op.name not in _SKIPPED and op.supported_dtypes("cpu")]


@pytest.mark.nightly
@pytest.mark.parametrize("op", _JUDGED, ids=_name)
def test_the_judge_finds_no_rule_wrong_in_any_sample(op: Any, mesh: DeviceMesh) -> None:
    said = judged(op, mesh, dtype=torch.float64, num_samples=16)
    assert not said.flagged, "\n".join(said.flagged)
