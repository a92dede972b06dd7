"""Prove, by running it, that a pair of linears may be sharded column- then row-wise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from vescale_dtensor import InterleavedShard, local_boxes
from vescale_parallel._model.copies import copied_without_hooks
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.linear_layout import features, linear_kind
from vescale_parallel._tensor_parallel.sharding_spec import (
    Resolved,
    parse_placement,
    placement_text,
)
from vescale_parallel._trace.generators import untouched_generators

# Larger modules are not run: the certificate holds two copies of their weights in float64.
MAX_NUMEL = 2**26


def contradicted_module(model: nn.Module, resolved: Resolved, size: int) -> str | None:
    """Return a module that a hand-written plan shards wrongly, if running one shows it.

    Only pairs of linears within one module that can be called on one tensor are run, one of
    each kind; other parts of a plan are taken as they are written.
    """
    seen: set[object] = set()
    for fqn, module in model.named_modules():
        linears = {n: c for n, c in module.named_children() if linear_kind(c) is not None}
        if len(linears) < 2:
            continue
        own = _own_plan(resolved, fqn, linears)
        key = (type(module), generalize(fqn), tuple(own.items()))
        if key in seen:
            continue
        seen.add(key)
        *_, row = linears
        kind = linear_kind(linears[row])
        assert kind is not None
        if len(own) < 2 or own.get(f"{row}.weight") != f"Shard({kind.in_dim})":
            continue
        outer = features(linears[row], kind)[1]
        runs_alone = _proven(module, {f"{row}.weight": f"Shard({kind.in_dim})"}, row, 1, outer)
        marked = {name for name in own if name.endswith("<grad>")}
        proven = _proven(
            module, {n: t for n, t in own.items() if n not in marked}, row, size, outer
        )
        if runs_alone is not None and (proven is None or set(proven) != set(own)):
            return fqn or type(model).__name__
    return None


def _own_plan(resolved: Resolved, fqn: str, linears: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the part of a plan that is about one module, with names relative to it."""
    prefix = f"{fqn}." if fqn else ""
    if any(
        f"{prefix}{name}" in {*(fqn for fqn, _ in resolved.inputs), *resolved.outputs}
        for name in linears
    ):
        return {}
    own = {
        f"{name}.weight": placement_text(resolved.parameters[f"{prefix}{name}.weight"])
        for name in linears
        if f"{prefix}{name}.weight" in resolved.parameters
    }
    own |= {f"<attr:{name}>": "Shard(0)" for owner, name in resolved.attributes if owner == fqn}
    grads = [name.removeprefix(prefix) for name in resolved.grads if name.startswith(prefix)]
    return own | {f"{name}.<grad>": "Partial()" for name in grads}


def certified_region(
    module: nn.Module, linears: Mapping[str, nn.Module], size: int
) -> dict[str, str]:
    """Return a sharding plan for one module if running it proves the plan right.

    The last linear becomes row-wise, the others column-wise (fused projections in equal
    parts), and integers that count heads or features are divided where that is needed. Every
    variant is run on random weights, rank by rank, forward and backward: the sum of outputs,
    the gradient of the input and that of every parameter must be those of the whole.

    Args:
        module: A module that can be called on one tensor (batch, sequence, features).
        linears: Its children that are linear layers, by name, in definition order.
        size: Ranks along the tensor-parallel axis.

    Returns:
        Names relative to ``module`` to placement text; empty if no variant is right.
    """
    if sum(p.numel() for p in module.parameters()) > MAX_NUMEL:
        return {}
    *columns, row = linears
    row_kind = linear_kind(linears[row])
    assert row_kind is not None
    inner, outer = features(linears[row], row_kind)
    if inner % size:
        return {}
    plan = {f"{row}.weight": f"Shard({row_kind.in_dim})"}
    for name in columns:
        kind = linear_kind(linears[name])
        assert kind is not None
        arriving, leaving = features(linears[name], kind)
        if arriving != outer or leaving % size:
            return {}
        parts = leaving // inner if leaving % inner == 0 and leaving > inner else 1
        if parts > 1 and inner % size == 0:
            plan[f"{name}.weight"] = f"InterleavedShard({kind.out_dim}, {parts})"
        else:
            plan[f"{name}.weight"] = f"Shard({kind.out_dim})"
    for attributes in _divisible_attributes(module, inner, size):
        variant = plan | {f"<attr:{name}>": "Shard(0)" for name in attributes}
        proven = _proven(module, variant, row, size, outer)
        if proven is not None:
            return proven
    return {}


def _divisible_attributes(module: nn.Module, inner: int, size: int) -> list[tuple[str, ...]]:
    """Sets of integer attributes that may have to be divided, fewest first."""
    numbers = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, int) and not isinstance(value, bool) and value % size == 0 and value
    }
    heads = tuple(name for name in numbers if "head" in name and "dim" not in name)
    widths = tuple(name for name, value in numbers.items() if value == inner)
    return list(dict.fromkeys([(), heads, widths, (*heads, *widths)]))


def _proven(
    module: nn.Module, plan: Mapping[str, str], row: str, size: int, outer: int
) -> dict[str, str] | None:
    """Run the module whole and rank by rank; return the plan, completed, if they agree.

    What is completed are the marks of whole parameters whose gradients ranks must add up.
    """
    with untouched_generators(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = _random_copy(module)
            x_BSF = torch.randn(2, 3, outer, dtype=torch.float64)
            cotangent_BSF = torch.randn(2, 3, outer, dtype=torch.float64)
            expected = _run(whole, (), x_BSF, cotangent_BSF)
            columns = [n.removesuffix(".weight") for n in plan if n.endswith(".weight")]
            columns.remove(row)
            runs = [
                _run(_rank_copy(whole, plan, row, size, rank), columns, x_BSF, cotangent_BSF)
                for rank in range(size)
            ]
        # Arbitrary user code: whatever it raises only means that this variant is not proven.
        except Exception:
            return None
    bias = whole.get_submodule(row)._parameters.get("bias")
    total = torch.stack([run.output for run in runs]).sum(0)
    if bias is not None:
        total = total + bias.detach()
    shared = torch.stack([run.column_grad for run in runs]).sum(0)
    agrees = _close(total, expected.output) and all(
        _close(shared + run.other_grad, expected.other_grad) for run in runs
    )
    return _with_partial_grads(whole, plan, row, expected, runs) if agrees else None


@dataclass(frozen=True)
class _Run:
    """One forward and backward pass.

    Attributes:
        output: What the module returned.
        column_grad: Gradient of the input through column-wise linears, which ranks add up.
        other_grad: Gradient of the input by all other ways.
        grads: Gradient of every parameter, by name.
    """

    output: Tensor
    column_grad: Tensor
    other_grad: Tensor
    grads: dict[str, Tensor]


def _run(module: nn.Module, columns: Sequence[str], x: Tensor, cotangent: Tensor) -> _Run:
    x = x.clone().requires_grad_()
    arriving: list[Tensor] = []

    def apart(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if args[0] is not x:
            raise ValueError("a column-wise linear reads something other than the input")
        arriving.append(x.detach().clone().requires_grad_())
        return (arriving[-1], *args[1:])

    for name in columns:
        module.get_submodule(name).register_forward_pre_hook(apart)
    output: Tensor = module(x)
    output.backward(cotangent)
    zero = torch.zeros_like(x)
    through = [each.grad for each in arriving if each.grad is not None]
    return _Run(
        output.detach(),
        torch.stack([zero, *through]).sum(0),
        zero if x.grad is None else x.grad,
        {n: zero if p.grad is None else p.grad for n, p in module.named_parameters()},
    )


def _with_partial_grads(
    whole: nn.Module,
    plan: Mapping[str, str],
    row: str,
    expected: _Run,
    runs: Sequence[_Run],
) -> dict[str, str] | None:
    """Return the plan with ``<grad>`` marks, None if a parameter's gradient cannot be had."""
    completed = dict(plan)
    for name in dict(whole.named_parameters()):
        owner = name.rpartition(".")[0]
        text = plan.get(f"{owner}.weight")
        # The row-wise linear's bias is added after the sum, outside of what ranks run.
        if name == f"{row}.bias":
            continue
        found = [run.grads[name] for run in runs]
        if text is not None:
            text = text if name.endswith(".weight") else _bias_placement(text)
            parts = [_part(expected.grads[name], text, len(runs), r) for r in range(len(runs))]
            if not all(map(_close, found, parts)):
                return None
        elif not all(_close(grad, expected.grads[name]) for grad in found):
            if not _close(torch.stack(found).sum(0), expected.grads[name]):
                return None
            completed[f"{name}.<grad>"] = "Partial()"
    return completed


def _close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9, atol=1e-9)


def _random_copy(module: nn.Module) -> nn.Module:
    """Copy a module with random float64 parameters, whatever its tensors are made of."""

    def random_parameter(parameter: nn.Parameter) -> nn.Parameter:
        fan = max(parameter.shape[-1:] or (1,))
        return nn.Parameter(torch.randn(parameter.shape, dtype=torch.float64) / fan**0.5)

    def same_buffer(buffer: Tensor) -> Tensor:
        return buffer.clone()

    return copied_without_hooks(module, random_parameter, same_buffer).eval()


def _rank_copy(
    whole: nn.Module, plan: Mapping[str, str], row: str, size: int, rank: int
) -> nn.Module:
    """Copy a module as one rank sees it: cut weights, divided integers, no row bias."""
    local = copy.deepcopy(whole)
    for name, text in plan.items():
        if name.startswith("<attr:"):
            attribute = name[6:-1]
            setattr(local, attribute, getattr(local, attribute) // size)
            continue
        owner = local.get_submodule(name.rpartition(".")[0])
        _cut(owner, "weight", text, size, rank)
        if owner is local.get_submodule(row):
            if owner._parameters.get("bias") is not None:
                owner.get_parameter("bias").data.zero_()
        elif owner._parameters.get("bias") is not None:
            _cut(owner, "bias", _bias_placement(text), size, rank)
        kind = linear_kind(owner)
        if kind is not None:
            setattr(owner, kind.out_attribute, owner.get_parameter("weight").shape[kind.out_dim])
    return local


def _bias_placement(weight_placement: str) -> str:
    """Return how the bias of a column-wise linear is cut: like the output features."""
    head, _, tail = weight_placement.partition("(")
    return f"{head}(0{tail[1:]}"


def _cut(owner: nn.Module, name: str, text: str, size: int, rank: int) -> None:
    part = _part(owner.get_parameter(name).data, text, size, rank)
    owner._parameters[name] = nn.Parameter(part)


def _part(tensor: Tensor, text: str, size: int, rank: int) -> Tensor:
    """Return what one rank holds of a tensor."""
    placement = parse_placement(text)
    assert isinstance(placement, Shard | InterleavedShard)
    boxes = local_boxes(tensor.shape, (size,), (rank,), (placement,))
    return torch.cat([tensor[held.box.slices] for held in boxes], placement.dim).clone()
