"""Check a sharding plan that a person wrote, by running it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_parallel._model.linear_layout import linear_kind
from vescale_parallel._tensor_parallel.sharding_spec import ShardingSpec
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._trace.dry_run import DryRunError, asks_for_values

from .dry_runs import DryRuns, dry_runs_of_few
from .equivalence import CheckResult, Contradiction, check_plan
from .single_module import contradicted_module
from .threads import in_fresh_thread


def checked_plan(
    model: nn.Module, sharding: TensorSharding, batch: Any, *, declared: bool = False
) -> tuple[TensorSharding, bool]:
    """Return the plan, completed by partial gradients, and whether it was proven.

    A ``declared`` plan has to say itself which gradients are partial values.

    Without an example, or if the model cannot be run without values, only pairs of linears
    within modules that can be called on one tensor are run.

    Raises:
        ValueError: With the module whose results or gradients the plan changes.
    """
    if batch is not None:
        try:
            result = in_fresh_thread(
                lambda: _check(dry_runs_of_few(model, batch), sharding), of=model
            )
        except Contradiction as error:
            raise ValueError(
                "tensor_parallel.sharding_plan changes what "
                f"{error.fqn or type(model).__name__!r} computes: run whole "
                f"and on {sharding.size} ranks on random weights, {error.why}"
            ) from error
        except DryRunError:
            return checked_plan(model, sharding, None, declared=declared)
        for fqn in sorted(result.whole_grads.intersection(sharding.spec.grads)):
            raise ValueError(
                f"tensor_parallel.sharding_plan: ranks do not hold partial values of the gradient "
                f"of {fqn!r}; leave out its <grad>"
            )
        for fqn in (
            sorted(result.partial_grads.difference(sharding.spec.grads)) if declared else ()
        ):
            raise ValueError(
                f"tensor_parallel.communication is 'declared', and ranks hold partial "
                f"values of the gradient of {fqn!r}; add '{fqn}.<grad>': 'Partial()' to the "
                "sharding plan"
            )
        _warn_of_unchecked(result)
        grads = {**sharding.spec.grads, **dict.fromkeys(result.partial_grads, Partial())}
        return replace(sharding, spec=replace(sharding.spec, grads=grads)), True
    _check_kinds(model, sharding.spec)
    wrong = contradicted_module(model, sharding)
    if wrong is not None:
        raise ValueError(
            f"tensor_parallel.sharding_plan changes what {wrong.fqn!r} computes: run whole and "
            f"rank by rank on random weights, {wrong.why}"
        )
    return sharding, False


def _check(runs: DryRuns, sharding: TensorSharding) -> CheckResult:
    try:
        return check_plan(runs, sharding)
    except DryRunError as error:
        if not asks_for_values(error):
            raise
        return check_plan(runs, sharding, needs_values=True)


def _warn_of_unchecked(result: CheckResult) -> None:
    """Say what was only found to fit in shape."""
    reasons = dict.fromkeys(result.too_large, "it is too large to be run") | dict(result.unchecked)
    for fqn, why in reasons.items():
        warnings.warn(
            f"tensor_parallel.sharding_plan: {fqn!r} fits in shape and was not compared with one "
            f"device: {why}",
            stacklevel=2,
        )
        return


def _check_kinds(model: nn.Module, spec: ShardingSpec) -> None:
    """Refuse placements that only a run can show to be right."""
    marks = [f"{fqn}.<read:{name}>" for fqn, name in spec.read_parts]
    marks += [f"{fqn}.<slice:{name}>" for fqn, name in spec.slices]
    for mark in marks:
        raise ValueError(
            f"tensor_parallel.sharding_plan: {mark} needs an example to compare it "
            "with one device on. Give parallelize a data set"
        )
    for fqn, placement in spec.parameters.items():
        owner_fqn, _, name = fqn.rpartition(".")
        owner = model.get_submodule(owner_fqn)
        rows = isinstance(owner, nn.Embedding) and placement == Shard(0)
        linear = linear_kind(owner) is not None and name in ("weight", "bias")
        if placement != Replicate() and not rows and not linear:
            raise ValueError(
                f"tensor_parallel.sharding_plan: {fqn!r} cannot be {placement!r} without an "
                "example to compare it with one device on; without one, only weights of linear "
                "layers and rows of embeddings can be sharded. Give parallelize a data set"
            )
