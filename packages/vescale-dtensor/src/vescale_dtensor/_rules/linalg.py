"""Factorizations, inverses and the like of matrices in a batch: every matrix on its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vescale_dtensor._layout.layout import replicated
from vescale_dtensor._sharding.local_plan import distributed
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._sharding.signature import Dims, Signature
from vescale_dtensor._tensor.dtensor import redistributed
from vescale_dtensor._torch_private import OpOverload

from .decompositions import unless_empty
from .pointwise import aligned

aten = torch.ops.aten


def _batched(call: OpCall) -> Signature:
    """Return the signature of an operator on matrices, with pivots or without."""
    pivots = [call.tensor_index(name) for name in ("pivots", "LU_pivots")]
    cores = [1 if index in pivots else 2 for index in range(len(call.layouts))]
    pairs = [(tuple(made.shape), core) for made, core in zip(call.layouts, cores, strict=True)]
    batch = torch.broadcast_shapes(*(shape[: len(shape) - core] for shape, core in pairs))
    inputs = tuple(_aligned(shape, core, batch) for shape, core in pairs)
    outputs = tuple(
        # What was not asked for has one dim of size 0.
        _aligned(tuple(tensor.shape), tensor.ndim - len(batch), batch)
        if tensor.ndim >= len(batch) and tensor.numel() else (None,) * tensor.ndim
        for tensor in call.outputs
    )  # fmt: skip
    return Signature(inputs, outputs, function=unless_empty(call))


def _aligned(shape: tuple[int, ...], core: int, batch: torch.Size) -> Dims:
    """Return letters for the batch dims of a shape that is broadcast to ``batch``."""
    return (*aligned(shape[: len(shape) - core], tuple(batch)), *(None for _ in range(core)))


def _eig(call: OpCall) -> Signature:
    values, vectors = call.result
    call.result = (values, _column_major(vectors))
    return _batched(call)


def _svd(call: OpCall) -> Signature:
    left, values, right = call.result
    if call.tensors[0].device.type == "cpu":
        call.result = (left, values, _column_major(right))
    return _batched(call)


def _column_major(matrices: Tensor) -> Tensor:
    """Return matrices with the strides that LAPACK gives them, which torch's meta tensors lack."""
    return matrices.mT.contiguous().mT


def _solve(call: OpCall) -> Signature | None:
    matrix, right = call.layouts
    if len(right.shape) == 1:
        return None
    if tuple(right.shape) == tuple(matrix.shape[:-1]):  # a vector for every matrix
        batch = matrix.shape[:-2]
        inputs = (_aligned(tuple(matrix.shape), 2, batch), _aligned(tuple(right.shape), 1, batch))
    elif len(right.shape) != len(matrix.shape):
        # Whether the right side is vectors would depend on how many matrices a rank has.
        return None
    else:
        batch = torch.broadcast_shapes(matrix.shape[:-2], right.shape[:-2])
        inputs = tuple(_aligned(tuple(made.shape), 2, batch) for made in call.layouts)
    outputs = tuple(
        _aligned(tuple(tensor.shape), tensor.ndim - len(batch), batch) for tensor in call.outputs
    )
    return Signature(inputs, outputs, function=unless_empty(call))


def _check_errors(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on all ranks if a matrix of any rank was singular, or the like."""
    call = OpCall(func, args, kwargs)
    errors = distributed(call.tensors[0], call)
    whole = redistributed(errors, replicated(call.mesh))._local_tensor
    func(whole, *args[1:], **kwargs)


# Removed in torch 2.14.
_OF_OLD = [aten.cholesky.default] if hasattr(aten, "cholesky") else []
RULES: dict[OpOverload, Any] = {
    **dict.fromkeys(
        (
            aten.linalg_inv_ex.default, aten.linalg_cholesky_ex.default, *_OF_OLD,
            aten.cholesky_inverse.default, aten.cholesky_solve.default,
            aten.linalg_qr.default, aten._linalg_eigh.default,
            aten.linalg_eigvals.default, aten._linalg_eigvals.default,
            aten._linalg_det.default, aten._linalg_slogdet.default,
            aten.linalg_lu_factor_ex.default, aten.linalg_lu.default,
            aten.linalg_lu_solve.default, aten.lu_unpack.default,
            aten.linalg_matrix_exp.default, aten.linalg_solve_triangular.default,
            aten.triangular_solve.default, aten.geqrf.default,
            aten.linalg_ldl_factor_ex.default,
        ),
        _batched,
    ),
    aten._linalg_solve_ex.default: _solve,
    aten.linalg_eig.default: _eig,
    aten._linalg_svd.default: _svd,
}  # fmt: skip
HANDLERS: dict[OpOverload, Any] = {aten._linalg_check_errors.default: _check_errors}
