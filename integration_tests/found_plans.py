"""Sharding plans that this process has found before.

Finding a plan takes seconds on every rank, and these tests cut the same few models in the same few
ways. What was found once is taken for every model of the same classes, shapes, plain attributes
and example; every test still checks what that plan computes. The tests of vescale-parallel find
every plan anew, and whatever starts processes of its own does here.
"""

# ruff: noqa: PLC2701 (what searches has no public name under which it could be replaced)

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from vescale_parallel import ShardingProposal, propose_sharding
from vescale_parallel._auto_sharding import planned

_FOUND: dict[object, ShardingProposal] = {}
_PLAIN = (bool, int, float, str, type(None))


def _propose(
    model: nn.Module,
    policy: str,
    size: int,
    *,
    sequence: bool = False,
    example_batch: Any = None,
) -> ShardingProposal:
    key = (policy, size, sequence, _model_key(model), _example_key(example_batch))
    if key not in _FOUND:
        _FOUND[key] = propose_sharding(
            model, policy, size, sequence=sequence, example_batch=example_batch
        )
    return _FOUND[key]


def _model_key(model: nn.Module) -> object:
    kinds = tuple(type(module) for module in model.modules())
    modules = [(name, m.training, m._forward_hooks) for name, m in model.named_modules()]
    attributes = [
        (name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if _is_plain(value)
    ]
    places: dict[int, int] = {}
    tensors = [
        (name, places.setdefault(id(t), len(places)), t.shape, t.dtype, t.requires_grad, t.device)
        for kind in (model.named_parameters, model.named_buffers)
        for name, t in kind(remove_duplicate=False)
    ]
    texts = str(getattr(model, "config", "")), str(model)
    return kinds, repr((*texts, modules, attributes, tensors))


def _is_plain(value: Any) -> bool:
    """Whether a value shows all that it is: code may go by what a dictionary says."""
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in _PLAIN


def _example_key(example: Any) -> object:
    leaves, spec = pytree.tree_flatten(example)
    return repr((spec, [_leaf_key(leaf) for leaf in leaves]))


def _leaf_key(leaf: Any) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    values = () if leaf.is_floating_point() else leaf.tolist()
    return leaf.shape, leaf.dtype, leaf.requires_grad, values


planned.propose_sharding = _propose  # pyright: ignore[reportPrivateImportUsage]: for tests
