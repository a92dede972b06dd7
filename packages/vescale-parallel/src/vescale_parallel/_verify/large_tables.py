"""Tables and heads of models that are too large to be run: who reads them, and fewer rows of them.

A table that nothing but its own ``nn.Embedding`` or ``nn.Linear`` reads is a region of its own. It
is compared with one device on a module of the same class with fewer rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from vescale_parallel._tensor_parallel.sharding_spec import ShardingSpec
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding, shard
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.dry_run import DryRunError

from .compared_runs import compare
from .dry_runs import DryRuns
from .region import Findings, How, Region

_ROWS, _FEATURES = 7, 4


def checked_tables(
    runs: DryRuns,
    sharding: TensorSharding,
    cut: Sequence[str],
    inside: tuple[str, ...],
) -> Mapping[str, str]:
    """Return which cut parameters were compared apart from the model (""), and which cannot be.

    Returned are parameter FQN to nothing, or to the reason. Of blocks, whose prefixes are
    ``inside``, only those that others read, too.
    """
    model = runs.model
    try:
        readers = runs.readers()
    except DryRunError as error:
        return dict.fromkeys(cut, f"who reads it is not known: {error}")
    found: dict[str, str] = {}
    for fqn in cut:
        block = next((each for each in inside if fqn.startswith(each)), None)
        owner = fqn.rpartition(".")[0]
        home = f"{owner}." if block is None else block
        tied = _owners(model, fqn)
        others = {r for r in readers.get(fqn, ()) if not f"{r}.".startswith((home, *tied))}
        if others:
            found[fqn] = f"it is read outside of its module, in {sorted(others)[0]!r}"
        elif block is None and _is_table(model.get_submodule(owner), owner, sharding.spec):
            found[fqn] = _compared(model.get_submodule(owner), sharding)
    return found


def _owners(model: nn.Module, fqn: str) -> tuple[str, ...]:
    parameter = model.get_parameter(fqn)
    named = model.named_parameters(remove_duplicate=False)
    return tuple(f"{name.rpartition('.')[0]}." for name, p in named if p is parameter)


def _is_table(module: nn.Module, fqn: str, spec: ShardingSpec) -> bool:
    placement = spec.parameters.get(f"{fqn}.weight")
    is_head = type(module) is nn.Linear and fqn in spec.outputs
    return placement == Shard(0) and (type(module) is nn.Embedding or is_head)


def _compared(module: nn.Module, sharding: TensorSharding) -> str:
    rows = _ROWS * sharding.size + 1
    with torch.device("cpu"):
        if isinstance(module, nn.Embedding):
            padding = None if module.padding_idx is None else min(module.padding_idx, rows - 1)
            small: nn.Module = nn.Embedding(
                rows,
                _FEATURES,
                padding_idx=padding,
                norm_type=module.norm_type,
                scale_grad_by_freq=module.scale_grad_by_freq,
            )
            given: Tensor = torch.arange(rows).view(1, -1)
            plan = {"0.weight": "Shard(0)"}
        else:
            small = nn.Linear(_FEATURES, rows, bias=module._parameters.get("bias") is not None)
            given = torch.randn(2, 3, _FEATURES, dtype=torch.float64, requires_grad=True)
            plan = {"0.weight": "Shard(0)", "0.<out>": "Replicate()"}
        held = nn.Sequential(small)
    leaves, spec = pytree.tree_flatten(((given,), {}))
    whole: tuple[Placement | None, ...] = (Replicate(),)
    compare(
        lambda: Region(held, "", leaves, spec, How(whole, None)),
        shard(plan, held, sharding.size),
        Findings(),
    )
    return ""
