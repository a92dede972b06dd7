"""Prove a sharding plan by running it: every kind of block, whole and on all ranks.

The ranks are threads, each with its own part of the parameters and the very hooks that will
run. In float64 and on random weights, what the block returns and every gradient must agree
with the whole block's. Nothing about operators is assumed.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from ._copies import copied_without_hooks
from ._rehearsal import (
    Call,
    RehearsalError,
    copied_object,
    cut_parameters,
    placement_between,
    rank_part,
    rehearse_part,
    rehearse_whole,
)
from ._sharding_plan import Resolved, generalize
from ._structure import block_stacks
from ._tensor_parallel import install, stack_of
from ._torch_private import pytree
from ._tp_boundaries import Boundary
from ._tp_ranks import Meeting, ThreadRanks

# Larger blocks are not run: two copies of their weights in float64 take a GiB.
MAX_NUMEL = 2**26


class Contradiction(ValueError):
    """A plan changes what a module computes.

    Attributes:
        fqn: The module.
        why: What differs.
    """

    def __init__(self, fqn: str, why: str) -> None:
        super().__init__(f"{fqn or 'the model'}: {why}")
        self.fqn, self.why = fqn, why


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What running a plan showed.

    Attributes:
        partial_grads: Whole parameters of which ranks' gradients are addends.
        whole_grads: Whole parameters of which every rank has the whole gradient, and not zero.
        proven: Blocks that were run, one of each kind, the model itself being ``""``.
        too_large: Blocks that only fit in shape, being too large to run.
    """

    partial_grads: frozenset[str]
    whole_grads: frozenset[str]
    proven: tuple[str, ...]
    too_large: tuple[str, ...]


@dataclass(eq=False)
class _Found:
    partial: set[str] = field(default_factory=set[str])
    whole: set[str] = field(default_factory=set[str])
    proven: list[str] = field(default_factory=list[str])
    too_large: list[str] = field(default_factory=list[str])


def prove(
    model: nn.Module,
    batch: Any,
    resolved: Resolved,
    placements: dict[str, Placement],
    size: int,
    *,
    whole: Mapping[str, Call] | None = None,
) -> Proof:
    """Run a plan without a second rank.

    Args:
        model: Whole.
        batch: An example, small.
        resolved: The plan.
        placements: Of every cut parameter.
        size: Tensor-parallel ranks.
        whole: What :func:`blocks_of_whole` gave for the model and batch, to save the time.

    Raises:
        Contradiction: If a block's results or gradients differ, or shapes do not fit.
        RehearsalError: If the whole model cannot be run without values.
    """
    whole = blocks_of_whole(model, batch) if whole is None else whole
    blocks = list(whole)
    try:
        part = rehearse_part(model, batch, blocks, resolved, placements, size)
    except RehearsalError as error:
        raise Contradiction(error.fqn, f"one rank's part does not run: {error}") from error
    found = _Found()
    kinds: dict[object, str] = {}
    for fqn in blocks:
        if fqn not in whole or fqn not in part:
            continue
        module = model.get_submodule(fqn)
        how = _match(fqn, whole[fqn], part[fqn], size)
        kind = (
            *(generalize(fqn), type(module), _shapes(module), _shapes_of(whole[fqn]), repr(how)),
            _said(resolved, placements, fqn),
            _scalars(module),
        )
        if kinds.setdefault(kind, fqn) != fqn:
            found.partial |= _renamed(found.partial, kinds[kind], fqn)
            found.whole |= _renamed(found.whole, kinds[kind], fqn)
        elif sum(p.numel() for p in module.parameters()) > MAX_NUMEL:
            found.too_large.append(fqn)
        else:
            _prove_block(module, fqn, whole[fqn], how, resolved, placements, size, found)
            found.proven.append(fqn)
    return Proof(
        partial_grads=frozenset(found.partial),
        whole_grads=frozenset(found.whole),
        proven=tuple(found.proven),
        too_large=tuple(found.too_large),
    )


def blocks_of_whole(model: nn.Module, batch: Any) -> dict[str, Call]:
    """Return how the whole model calls its blocks, or the model itself if it has none.

    Raises:
        RehearsalError: If the forward needs values.
    """
    blocks = [fqn for stack in block_stacks(model) for fqn in stack] or [""]
    return rehearse_whole(model, batch, blocks)


def _renamed(names: set[str], old: str, new: str) -> set[str]:
    return {new + name.removeprefix(old) for name in names if name.startswith(f"{old}.")}


def _said(resolved: Resolved, placements: Mapping[str, Placement], fqn: str) -> object:
    """Return what a plan says of a block, by names within it."""
    found: list[tuple[str, ...]] = []
    for field_name, said in {**vars(resolved), "placements": placements}.items():
        pairs = said.items() if isinstance(said, Mapping) else ((key, True) for key in said)
        for key, value in pairs:
            owner, rest = key if isinstance(key, tuple) else (key, "")
            if not fqn or f"{owner}.".startswith(f"{fqn}."):
                found.append((field_name, owner.removeprefix(fqn), str(rest), repr(value)))
    return tuple(sorted(found))


def _scalars(module: nn.Module) -> str:
    """Return the plain attributes that may steer a forward, but for where the module is."""
    return repr(
        [
            (name, value)
            for each in module.modules()
            for name, value in vars(each).items()
            if type(value) in (bool, int, float, str)
            and not name.endswith(("idx", "index", "_id"))
        ]
    )


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(p.shape) for p in module.parameters())


def _shapes_of(call: Call) -> str:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return repr([tuple(x.shape) if isinstance(x, Tensor) else type(x) for x in leaves])


@dataclass(frozen=True)
class _How:
    """How the leaves of a call's inputs and output lie over the ranks."""

    inputs: tuple[Placement | None, ...]
    output: tuple[Placement | None, ...]


def _match(fqn: str, whole: Call, part: Call, size: int) -> _How:
    def placements(ours: Any, theirs: Any, what: str) -> tuple[Placement | None, ...]:
        found: list[Placement | None] = []
        pairs = (pytree.tree_leaves(ours), pytree.tree_leaves(theirs))
        if len(pairs[0]) != len(pairs[1]):
            raise Contradiction(fqn, f"{what} has {len(pairs[1])} leaves, not {len(pairs[0])}")
        for one, other in zip(*pairs, strict=True):
            placement = None
            if isinstance(one, Tensor):
                placement = placement_between(one, other, size)
                if placement is None:
                    raise Contradiction(
                        fqn,
                        f"{what} of shape {tuple(one.shape)} has shape {tuple(other.shape)} "
                        f"on a rank of {size}",
                    )
            found.append(placement)
        return tuple(found)

    return _How(
        placements((whole.args, dict(whole.kwargs)), (part.args, dict(part.kwargs)), "an input"),
        placements(whole.output, part.output, "an output"),
    )


def _prove_block(
    module: nn.Module,
    fqn: str,
    call: Call,
    how: _How,
    resolved: Resolved,
    placements: dict[str, Placement],
    size: int,
    found: _Found,
) -> None:
    """Note which gradients are addends; raise if anything differs."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        whole = random_copy(module)
        leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        inputs = [_random_input(leaf) for leaf in leaves]
        given = _Given(inputs, spec, [])
        try:
            expected = _run(whole, given)
        except Exception as error:
            raise RehearsalError(fqn, error) from error
        cotangents = [torch.randn_like(out) for out in expected.outputs]
        expected = _run(whole, _Given(inputs, spec, cotangents))
        lengths = _sequence_lengths(leaves, expected.shapes, how)

        def on_rank(rank: int, meeting: Meeting) -> _Results:
            local = copy.deepcopy(whole)
            cut_parameters(local, placements, size, rank, fqn)
            boundary = Boundary(ThreadRanks(meeting, rank))
            boundary.lengths.update(dict.fromkeys((stack_of(fqn),), lengths) if lengths else {})
            install(local, resolved, placements, boundary, prefix=fqn)
            mine = [_part(x, p, size, rank) for x, p in zip(inputs, how.inputs, strict=True)]
            kept = [p for p, out in zip(how.output, expected.floats, strict=True) if out]
            parts = [_part(x, p, size, rank) for x, p in zip(cotangents, kept, strict=True)]
            return _run(local, _Given(mine, spec, parts))

        try:
            runs = run_in_threads(size, on_rank)
        except Exception as error:
            raise Contradiction(
                fqn, f"a rank's part raises {type(error).__name__}: {error}"
            ) from error
    _compare_results(fqn, expected, runs, how, size)
    _compare_gradients(fqn, expected, runs, placements, found)


def _sequence_lengths(leaves: Sequence[Any], outputs: Sequence[Any], how: _How) -> int:
    """Return the length of the sequence that activations at the border are cut along, or 0."""
    for leaf, placement in zip(leaves, how.inputs, strict=True):
        if isinstance(placement, Shard) and leaf.is_floating_point() and placement.dim == 1:
            return leaf.shape[placement.dim]
    return 0


@dataclass(frozen=True)
class _Given:
    inputs: list[Any]
    spec: Any
    cotangents: list[Tensor]


@dataclass(frozen=True)
class _Results:
    """One forward and backward: outputs and gradients.

    Attributes:
        floats: For every leaf of the output, whether it is one of ``outputs``.
    """

    outputs: list[Tensor]
    floats: list[bool]
    shapes: list[Any]
    input_grads: list[Tensor | None]
    grads: dict[str, Tensor]


def _run(module: nn.Module, given: _Given) -> _Results:
    inputs = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for x in given.inputs
    ]
    module.zero_grad()
    args, kwargs = pytree.tree_unflatten(
        [x if isinstance(x, Tensor) else copied_object(x) for x in inputs], given.spec
    )
    # Caches and the like hold nothing that was computed without values.
    with torch.enable_grad(), InDouble():
        output = module(*args, **kwargs)
    leaves = pytree.tree_leaves(output)
    floats = [isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad for x in leaves]
    outputs = [x for x, is_float in zip(leaves, floats, strict=True) if is_float]
    if given.cotangents:
        with InDouble():
            torch.autograd.backward(outputs, given.cotangents)
    return _Results(
        [x.detach() for x in outputs],
        floats,
        [tuple(x.shape) if isinstance(x, Tensor) else None for x in leaves],
        [x.grad if isinstance(x, Tensor) else None for x in inputs],
        {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in module.named_parameters()
        },
    )


def _compare_results(
    fqn: str, expected: _Results, runs: Sequence[_Results], how: _How, size: int
) -> None:
    kept = [p for p, is_float in zip(how.output, expected.floats, strict=True) if is_float]
    for rank, run in enumerate(runs):
        if run.floats != expected.floats:
            raise Contradiction(fqn, "a rank's part returns something else")
        for out, whole, placement in zip(run.outputs, expected.outputs, kept, strict=True):
            if not _close(out, _part(whole, placement, size, rank), whole):
                raise Contradiction(fqn, "what it returns differs")
        for grad, whole, placement in zip(
            run.input_grads, expected.input_grads, how.inputs, strict=True
        ):
            if not _same_gradient(grad, whole, placement, size, rank):
                raise Contradiction(fqn, "the gradient of an input differs")


def _compare_gradients(
    fqn: str,
    expected: _Results,
    runs: Sequence[_Results],
    placements: Mapping[str, Placement],
    found: _Found,
) -> None:
    size = len(runs)
    for name, whole in expected.grads.items():
        full = f"{fqn}.{name}".strip(".")
        placement = placements.get(full, Replicate())
        grads = [run.grads[name] for run in runs]
        parts = [_part(whole, placement, size, rank) for rank in range(size)]
        if all(_close(grad, part, whole) for grad, part in zip(grads, parts, strict=True)):
            if placement == Replicate() and bool(whole.any()):
                found.whole.add(full)
        elif placement == Replicate() and _close(torch.stack(grads).sum(0), whole, whole):
            found.partial.add(full)
        else:
            raise Contradiction(fqn, f"the gradient of {full!r} differs")


def _same_gradient(
    grad: Tensor | None, whole: Tensor | None, placement: Placement | None, size: int, rank: int
) -> bool:
    """Return whether a rank has its part of an input's gradient; none is zero."""
    if whole is None:
        return grad is None or not grad.any()
    part = _part(whole, placement, size, rank)
    return _close(torch.zeros_like(part) if grad is None else grad, part, whole)


def _close(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    largest = float(scale.abs().max()) if scale.numel() else 0.0
    return torch.allclose(
        found.double(), expected.double(), rtol=1e-9, atol=1e-10 * (largest + 1e-3)
    )


def _part(x: Any, placement: Placement | None, size: int, rank: int) -> Any:
    if not isinstance(x, Tensor) or placement is None or placement == Replicate():
        return x
    part = rank_part(x.detach(), placement, size, rank)
    return part.requires_grad_(x.requires_grad)


def run_in_threads(size: int, on_rank: Callable[[int, Meeting], Any]) -> list[Any]:
    """Call a function on every rank, each in a thread of its own.

    Raises:
        Exception: Whatever the first rank that failed raised.
    """
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[Exception] = []

    def work(rank: int) -> None:
        try:
            results[rank] = on_rank(rank, meeting)
        # Handed to the caller below.
        except Exception as error:
            errors.append(error)
            meeting.give_up()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


def random_copy(module: nn.Module) -> nn.Module:
    """Copy a module with random float64 parameters, whatever its tensors are made of."""

    def random_parameter(parameter: nn.Parameter) -> nn.Parameter:
        fan = max(parameter.shape[-1:] or (1,))
        data = torch.randn(parameter.shape, dtype=torch.float64) / max(fan, 1) ** 0.5
        return nn.Parameter(data, parameter.requires_grad)

    def same_buffer(buffer: Tensor) -> Tensor:
        if type(buffer) in (Tensor, nn.Buffer) and buffer.device.type != "meta":
            real = buffer.detach().cpu().clone()
            return real.double() if real.is_floating_point() else real
        if buffer.is_floating_point():
            return torch.rand(buffer.shape, dtype=torch.float64)
        return torch.zeros(buffer.shape, dtype=buffer.dtype)

    return copied_without_hooks(module, random_parameter, same_buffer).eval()


def _random_input(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point():
        values = torch.randn(leaf.shape, dtype=torch.float64)
        return values.requires_grad_(leaf.requires_grad)
    if type(leaf) is Tensor:
        return leaf.clone()
    return torch.zeros(leaf.shape, dtype=leaf.dtype)


_LOW = (torch.float32, torch.bfloat16, torch.float16)


class InDouble(TorchFunctionMode):
    """Has code that asks for float32 compute in float64, so that sums can be compared."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.float, Tensor.half, Tensor.bfloat16):
            func = Tensor.double
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return _grouped_mm(*args, **(kwargs or {}))
        kwargs = {name: _double(value) for name, value in (kwargs or {}).items()}
        return func(*map(_double, args), **kwargs)


def _grouped_mm(
    rows_TK: Tensor, weights_EKN: Tensor, offs: Tensor | None = None, **_: Any
) -> Tensor:
    """Multiply groups of rows each with a matrix of its own; torch's has no float64."""
    assert offs is not None
    assert weights_EKN.dim() == 3
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    parts = [rows_TK[a:b] @ w for a, b, w in zip(starts, ends, weights_EKN, strict=True)]
    left = rows_TK.new_zeros(len(rows_TK) - ends[-1], weights_EKN.shape[-1])
    return torch.cat([*parts, left])


def _double(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value
