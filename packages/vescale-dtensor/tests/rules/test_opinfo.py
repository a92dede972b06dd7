"""torch's own operator database on distributed tensors, against the plain operators."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_dtensor import emulate

from .device import DEVICE
from .sweep import MESHES, sweep_operator
from .sweep_cases import OPERATORS

# Some of every kind: pointwise, reductions, views, joins, indices, products, losses, norms,
# convolutions, decompositions, results of unknown shape, lists, complex numbers, writes.
_NAMES = """
    add addcmul all amax argmax as_strided.partial_views atan2 baddbmm bmm cat cdist clamp clone
    conj cumsum diag_embed diagonal div.no_rounding_mode einsum equal expand fft.fft
    fft.hfft flip gather imag index_put index_select isclose kron linalg.inv linalg.pinv
    linalg.solve linalg.vector_norm lerp log_softmax logcumsumexp masked_fill masked_select
    matmul max.reduction_with_dim mean nn.functional.conv2d nn.functional.cross_entropy
    nn.functional.embedding nn.functional.gelu nn.functional.layer_norm nn.functional.linear
    nn.functional.pad.constant nn.functional.scaled_dot_product_attention nonzero permute polar
    prod reshape roll scatter_add softmax sort split squeeze std sum t take_along_dim topk
    transpose tril unbind unfold unique unsqueeze var_mean where
"""
SLICE = _NAMES.split()


def _name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


@pytest.fixture(scope="module")
def meshes() -> Iterator[list[DeviceMesh]]:
    with emulate(4):
        yield [init_device_mesh(DEVICE, shape) for shape in MESHES]


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in OPERATORS if _name(op) in SLICE], ids=_name)
def test_an_operator_is_right_under_every_placement(op: Any, meshes: list[DeviceMesh]) -> None:
    record = sweep_operator(op, meshes, num_samples=2, num_assignments=3)
    assert record["counts"]
    assert not record["not_right"], "\n".join(map(str, record["not_right"]))


def test_the_slice_names_operators_of_the_database() -> None:
    assert set(SLICE) <= {_name(op) for op in OPERATORS}


@pytest.mark.nightly
@pytest.mark.parametrize("op", OPERATORS, ids=_name)
def test_an_operator_is_right_or_refused(op: Any, meshes: list[DeviceMesh]) -> None:
    record = sweep_operator(op, meshes)
    wrong = [each for each in record["not_right"] if each["kind"] != "refused"]
    assert not wrong, "\n".join(map(str, wrong))
