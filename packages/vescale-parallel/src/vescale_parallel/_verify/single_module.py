"""The numeric check of single modules, for models of which there is no example."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import Partial, Placement, Shard

from vescale_parallel._model.blocks import numel_of
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.linear_layout import features, linear_kind, linears_of
from vescale_parallel._tensor_parallel.sharding_spec import ShardingSpec, texts_of
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding, shard

from .dry_runs import DryRuns
from .equivalence import MAX_NUMEL, check_plan
from .region import Contradiction
from .threads import in_fresh_thread


def checked_alone(
    module: nn.Module, plan: Mapping[str, Placement], num_features: int, size: int
) -> tuple[dict[str, Placement] | None, str]:
    """Run a module whole and on all ranks, on one activation (batch, sequence, features).

    Names are relative to the module, of which a copy is run on random weights. The plan comes back
    with the marks of whole parameters of which ranks hold partial gradients; None, and why, if
    results or gradients differ, or if the module is too large or takes something else.
    """
    try:
        return _proven_alone(module, plan, num_features, size), "it is too large to be run"
    except Contradiction as error:
        return None, error.why
    # Arbitrary user code: whatever it raises only means that this plan is not proven.
    except Exception as error:
        return None, f"by itself it raises {type(error).__name__}: {error}"


def _proven_alone(
    module: nn.Module, plan: Mapping[str, Placement], num_features: int, size: int
) -> dict[str, Placement] | None:
    if numel_of(module) > MAX_NUMEL:
        return None
    # Its gradient is compared, too: what the module reads belongs to the model around it.
    batch = (torch.zeros(2, 3, num_features, requires_grad=True),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharding = shard(texts_of(plan), module, size)
        result = in_fresh_thread(lambda: _check(module, batch, sharding), of=module)
    if result is None:
        return None
    return {**plan, **{f"{fqn}.<grad>": Partial() for fqn in sorted(result)}}


def _check(module: nn.Module, batch: object, sharding: TensorSharding) -> frozenset[str] | None:
    runs, needs_values = DryRuns(module, batch), False
    try:
        runs.blocks()
    except ValueError:
        needs_values = True
    result = check_plan(runs, sharding, needs_values=needs_values)
    return None if result.unchecked or result.too_large else result.partial_grads


def contradicted_module(model: nn.Module, sharding: TensorSharding) -> Contradiction | None:
    """Return how a hand-written plan shards a module wrongly, if running one shows it.

    Only pairs of linears within one module that can be called on one tensor are run, one of
    each kind; other parts of a plan are taken as they are written.
    """
    seen: set[object] = set()
    for fqn, module in model.named_modules():
        linears = linears_of(module)
        if len(linears) < 2:
            continue
        own = _own_plan(sharding.spec, fqn, linears)
        key = (type(module), generalize(fqn), tuple(own.items()))
        if key in seen:
            continue
        seen.add(key)
        row, last = next(reversed(linears.items()))
        kind = linear_kind(last)
        assert kind is not None
        is_row_wise = sharding.placements.get(f"{fqn}.{row}.weight".lstrip(".")) == Shard(
            kind.in_dim
        )
        if len(own) < 2 or f"{row}.weight" not in own or not is_row_wise:
            continue
        width = features(last, kind)[1]
        unmarked = {name: each for name, each in own.items() if not name.endswith("<grad>")}
        proven, why = checked_alone(module, unmarked, width, sharding.size)
        if proven is not None and set(proven) == set(own):
            continue
        if checked_alone(module, {}, width, sharding.size)[0] is not None:
            why = why if proven is None else "gradients of other parameters are sums over ranks"
            return Contradiction(fqn or type(model).__name__, why)
    return None


def _own_plan(
    spec: ShardingSpec, fqn: str, linears: Mapping[str, nn.Module]
) -> dict[str, Placement]:
    """Return the part of a plan that is about one module, with names relative to it."""
    prefix = f"{fqn}." if fqn else ""
    moved = {*(name for name, _ in spec.inputs), *spec.outputs}
    if any(f"{prefix}{name}" in moved for name in linears):
        return {}
    own = {
        f"{name}.weight": spec.parameters[f"{prefix}{name}.weight"]
        for name in linears
        if f"{prefix}{name}.weight" in spec.parameters
    }
    counted = {name: each for (owner, name), each in spec.attributes.items() if owner == fqn}
    if any(each is not None for each in counted.values()):
        return {}  # what they count is no placement; the first call is compared
    own |= {f"<attr:{name}>": Shard(0) for name in counted}
    if fqn in spec.shaped:
        own["<shape>"] = spec.shaped[fqn]
    # A bias that is added to a part of the sequence has a partial gradient for that.
    on_parts = {fqn for fqn, placement in spec.left.items() if isinstance(placement, Shard)}
    grads = [
        name.removeprefix(prefix)
        for name in spec.grads
        if name.startswith(prefix) and name.rpartition(".")[0] not in on_parts
    ]
    return own | {f"{name}.<grad>": Partial() for name in grads}
