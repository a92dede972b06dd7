"""Flops of an operator, and which operators would need a rule for them and have none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from vescale_parallel._torch_private import pytree

from .fake_tensors import grouped_mm_flops, is_float

aten = torch.ops.aten

# The registry lacks the one of CPUs, and before torch 2.12 refuses heads that share keys.
_ATTENTION = frozenset((
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu,
))  # fmt: skip

# Several floating-point tensors and yet no products of matrices: these move elements,
# normalise, or compare. Whatever torch tags as pointwise is not listed.
_NOT_PRODUCTS = frozenset((
    "_fused_rms_norm", "_index_put_impl_", "_native_batch_norm_legit", "_unsafe_index_put",
    "_weight_norm_interface", "as_strided_scatter", "binary_cross_entropy", "cat", "copy",
    "copy_", "diagonal_scatter", "huber_loss", "index_add", "index_add_", "index_copy",
    "index_copy_", "index_put", "index_put_", "index_reduce", "masked_scatter",
    "masked_scatter_", "mse_loss", "native_batch_norm", "native_group_norm",
    "native_layer_norm", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "scatter_reduce", "select_scatter", "slice_scatter", "smooth_l1_loss", "stack",
))  # fmt: skip


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """Return the flops of an operator, None if there is no rule for it."""
    if func is aten._grouped_mm.default:
        return grouped_mm_flops(args[0].shape, args[1].shape)
    if func.overloadpacket in _ATTENTION:
        return _attention_flops(*(tensor.shape for tensor in args[:3]))
    rule = flop_registry.get(func.overloadpacket)
    return None if rule is None else int(rule(*args, **kwargs, out_val=out))


def _attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """Return the flops of scores and of their products with values; shapes are (B, H, S, E)."""
    return 2 * query[:-1].numel() * key[-2] * (query[-1] + value[-1])


class Uncounted:
    """Finds the operators that multiply with parameters and have no rule.

    A parameter of two or more dims is a weight, and so is what is computed of weights alone:
    a cast one, a transposed one, a dequantised one.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.operators: dict[str, None] = {}
        self.weights = {p.untyped_storage() for p in parameters if p.dim() > 1}

    def see(self, func: Any, inputs: Sequence[Tensor], out: Any) -> None:
        """Take note of an operator without a rule."""
        floats = [tensor for tensor in inputs if is_float(tensor.dtype)]
        weights = [tensor for tensor in floats if tensor.untyped_storage() in self.weights]
        if not weights:
            return
        if len(weights) == len(inputs):
            made = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
            self.weights.update(tensor.untyped_storage() for tensor in made)
        name = func._schema.name.rpartition("::")[2]
        moves = torch.Tag.pointwise in func.tags or name in _NOT_PRODUCTS
        if len(floats) > 1 and not moves:
            self.operators[str(func)] = None
