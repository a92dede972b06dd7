"""What our rules claim of one call of an operator, and what torch's judge says to that.

A claim is that a call with inputs of these placements, every rank computing on its own part by
the function that the rule gives it, has results of those placements. The judge cuts real
tensors (or takes them apart into pending sums, averages, minima, maxima, in ways that do not
cancel by chance), lets every rank compute, puts the results together and compares.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from vescale_dtensor import local_shape
from vescale_dtensor._comm.emulation import RankTensor, per_rank
from vescale_dtensor._layout.layout import layout
from vescale_dtensor._rules import HANDLERS, REFUSED, rule_of
from vescale_dtensor._sharding.local_plan import own_function
from vescale_dtensor._sharding.op_call import OpCall
from vescale_dtensor._sharding.signature import _apply, _options
from vescale_dtensor._sharding.view_plan import View
from vescale_dtensor._tensor.dtensor import wrap
from vescale_dtensor._torch_private import OpOverload, disable_current_modes

from .torch_judge import LocalTensor, LocalTensorMode, judge

_judges_pending = judge and judge._create_partial_input
NUM_RANKS = 2
_KINDS = (Replicate, Shard, Partial)
_SUMMED = (torch.float32, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Claim:
    """One combination that a rule allows, on a mesh of one axis.

    Attributes:
        inputs: A placement per tensor argument.
        outputs: A placement per tensor result.
        function: Takes and returns what all ranks have, as :class:`RankTensor`.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    function: Callable[..., Any]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass
class AtenCall:
    """One call of an operator, with what it returned."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def tensors(self) -> list[Tensor]:
        return [t for _, t in judge.extract_tensors_from_args(self.args, self.kwargs)]


@dataclass
class Judgment:
    """What the judge said of the claims about some calls."""

    right: int = 0
    untestable: int = 0
    unjudged: int = 0
    flagged: list[str] = field(default_factory=list)


def calls_of(op: Any, sample: Any) -> list[AtenCall]:
    """Return the calls that an operator's sample makes, those of its gradient included."""

    class Capture(judge._CaptureAtenOp):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # As they were: operators after it may write into its arguments and results.
            given, named = pytree.tree_map_only(Tensor, _copied, (args, kwargs or {}))
            result = func(*args, **(kwargs or {}))
            if "empty" in func.name():
                result.zero_()  # or whatever the memory held would be judged
            if func.namespace == "aten":
                kept = pytree.tree_map_only(Tensor, _copied, result)
                made.append(AtenCall(func, given, named, kept))
            return result

    made: list[AtenCall] = []
    torch.manual_seed(0)
    with Capture():
        result = op(sample.input, *sample.args, **sample.kwargs)
        wanted = [t for t in _tensors_of(sample) if t.requires_grad]
        outs = [
            leaf
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
        if wanted and outs:
            cotangents = [torch.randn_like(out) for out in outs]
            torch.autograd.grad(outs, wanted, cotangents, allow_unused=True)
    return made


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone()


def claims_of(called: AtenCall, mesh: DeviceMesh) -> list[Claim] | None:
    """Return what the operator's rule allows on ``mesh``, None if it has no rule."""
    func = called.func
    if func in REFUSED or func in HANDLERS or rule_of(func) is None:
        return None
    tensors = called.tensors
    whole = (Replicate(),) * len(tensors)
    seeds = [whole, *_singles(tensors), *_alike(tensors)]
    found: dict[tuple[Any, Any], Claim] = {}
    seen: set[tuple[Placement, ...]] = set()
    while seeds:
        seed = seeds.pop()
        if seed in seen:
            continue
        seen.add(seed)
        for claim in _claims_at(called, seed, mesh):
            key = claim.inputs, claim.outputs
            # The rule at these placements says it, not one at others that would move there.
            if key not in found or claim.inputs == seed:
                found[key] = claim
            seeds.append(claim.inputs)
    return [claim for claim in found.values() if set(claim.inputs) != {Replicate()}]


def _singles(tensors: Sequence[Tensor]) -> Iterator[tuple[Placement, ...]]:
    whole = (Replicate(),) * len(tensors)
    for index, tensor in enumerate(tensors):
        for placement in judge.get_1d_input_placements_for_tensor(tensor, include_partial=True):
            yield (*whole[:index], placement, *whole[index + 1 :])


def _alike(tensors: Sequence[Tensor]) -> Iterator[tuple[Placement, ...]]:
    for kind in ("sum", "avg", "min", "max"):
        yield (Partial(kind),) * len(tensors)
    for dim in range(max(t.ndim for t in tensors)):
        yield tuple(Shard(dim) if t.ndim > dim else Replicate() for t in tensors)


def _claims_at(called: AtenCall, seed: tuple[Placement, ...], mesh: DeviceMesh) -> Iterator[Claim]:
    rest = iter(seed)

    def place(tensor: Tensor) -> Tensor:
        placement = next(rest)
        made = layout(mesh, (placement,), tensor.shape, tensor.stride(), tensor.dtype)

        def part(coordinate: tuple[int, ...]) -> Tensor:
            return tensor.new_zeros(
                local_shape(tensor.shape, mesh.shape, coordinate, made.placements)
            )

        return wrap(per_rank(part, mesh), made)

    call = OpCall(called.func, *pytree.tree_map_only(Tensor, place, (called.args, called.kwargs)))
    rule = rule_of(called.func)
    assert rule is not None
    try:
        ruled = rule(call)
        if isinstance(ruled, View):
            yield from _view_claims(call, ruled, seed)
            return
        if ruled is None:
            return
        choices = [_apply(call, ruled, [option]) for option in _options(call, ruled, 0)]
    except NotImplementedError:
        return
    for op_spec in choices:
        if op_spec is None:
            continue
        yield Claim(
            tuple(made.placements[0] for made in op_spec.inputs),
            tuple(made.placements[0] for made in op_spec.outputs),
            own_function(call, ruled.arguments, ruled.function, op_spec.inputs, op_spec.outputs),
        )


def _view_claims(call: OpCall, view: View, seed: tuple[Placement, ...]) -> Iterator[Claim]:
    placed = view.place(call.layouts[0].placements)
    if placed is None:
        return
    outputs = tuple(
        layout(call.mesh, each, tensor.shape, tensor.stride(), tensor.dtype)
        for each, tensor in zip(placed, call.outputs, strict=True)
    )
    function = own_function(call, view.arguments, view.function, (call.layouts[0],), outputs)
    yield Claim(seed, tuple(made.placements[0] for made in outputs), function)


def judgment(called: AtenCall, claims: Sequence[Claim], mesh: DeviceMesh) -> Judgment:
    """Let the judge look at claims."""
    said = Judgment()
    result = [x for x in pytree.tree_leaves(called.result) if isinstance(x, Tensor)]
    mitigations = _negated(called)
    taking_apart = mock.patch.object(judge, "_create_partial_input", _pending)
    with LocalTensorMode(frozenset(range(NUM_RANKS))), taking_apart:
        for claim in claims:
            if not _can_be_judged(called, claim):
                said.unjudged += 1
                continue
            function = _for_the_judge(claim.function)
            right = judge._validate_aten_with_mitigations(
                function, called.args, called.kwargs, claim.inputs, claim.outputs, result,
                NUM_RANKS, mesh, mitigations,
            )  # fmt: skip
            if right is None:
                said.untestable += 1
            elif right:
                said.right += 1
            else:
                said.flagged.append(f"{called.func}: {claim}: {_why(called, claim, result, mesh)}")
    return said


def _pending(tensor: Tensor, placement: Partial, world_size: int, *choices: int) -> Any:
    """Take a tensor apart as the judge does, and into factors where it would repeat it."""
    if placement.reduce_op != "product":
        return _judges_pending(tensor, placement, world_size, *choices)
    numbers = torch.arange(tensor.numel()).reshape(tensor.shape)
    factors = torch.where(numbers % 2 == 0, 4.0, -0.5).to(tensor.dtype)  # powers of 2 are exact
    parts = [tensor * factors, factors.reciprocal()]
    ones = [torch.ones_like(tensor)] * (world_size - 2)
    return LocalTensor(dict(enumerate([*parts, *ones])))


def _negated(called: AtenCall) -> Any:
    """Return the judge's second look, with negated values; negated indices are out of bounds."""
    if all(t.is_floating_point() or t.is_complex() for t in called.tensors):
        return judge._prepare_aten_mitigations(called.func, called.args, called.kwargs)
    return judge._AtenFalsePositiveMitigations()


def _can_be_judged(called: AtenCall, claim: Claim) -> bool:
    """Whether the judge knows the placements, and how to take the tensors apart.

    It knows torch's own placements. It takes integers apart into fractions, so that integer
    operators are given floats; half precision rounds by more than it allows; and it asks for
    the largest of complex numbers.
    """
    if not all(type(p) in _KINDS for p in (*claim.inputs, *claim.outputs)):
        return False
    return not any(
        isinstance(placement, Partial)
        and (
            tensor.dtype not in _SUMMED
            or (tensor.is_complex() and placement.reduce_op in ("min", "max"))
        )
        for tensor, placement in zip(called.tensors, claim.inputs, strict=True)
    )


def _why(called: AtenCall, claim: Claim, result: list[Tensor], mesh: DeviceMesh) -> str:
    shapes = [tuple(t.shape) for t in called.tensors]
    _, why = judge.validate_aten_combination(
        _for_the_judge(claim.function), called.args, called.kwargs, result,
        (claim.inputs, claim.outputs), NUM_RANKS, mesh,
    )  # fmt: skip
    others = [x for x in (*called.args, *called.kwargs.items()) if not isinstance(x, Tensor)]
    return f"{why or 'with other values'} [{shapes} {others}]"


def _for_the_judge(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as one that takes the judge's tensors of all ranks."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with disable_current_modes():
            mine = pytree.tree_map_only(LocalTensor, _to_ranks, (args, kwargs))
            result = function(*mine[0], **mine[1])
        return [_from_ranks(x) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]

    return run


def _to_ranks(tensor: Any) -> RankTensor:
    return RankTensor([tensor._local_tensors[rank] for rank in range(NUM_RANKS)])


def _from_ranks(tensor: Tensor) -> Any:
    parts = tensor.parts if isinstance(tensor, RankTensor) else (tensor,) * NUM_RANKS
    return LocalTensor(dict(enumerate(parts)))


def judged(op: Any, mesh: DeviceMesh, *, dtype: torch.dtype, num_samples: int | None) -> Judgment:
    """Return what the judge says of the rules of all operators that samples of ``op`` call."""
    total = Judgment()
    seen: set[Any] = set()
    for sample in _samples(op, dtype, num_samples):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = calls_of(op.op, sample)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
            continue
        for called in made:
            if not _is_testable(called) or (key := _key(called)) in seen:
                continue
            seen.add(key)
            claims = claims_of(called, mesh)
            if claims:
                said = judgment(called, claims, mesh)
                total.right += said.right
                total.untestable += said.untestable
                total.unjudged += said.unjudged
                total.flagged += said.flagged
    return total


def _samples(op: Any, dtype: torch.dtype, num_samples: int | None) -> list[Any]:
    if dtype not in op.supported_dtypes("cpu"):
        dtype = next(iter(op.supported_dtypes("cpu")))
    inexact = dtype.is_floating_point or dtype.is_complex
    differentiable = inexact and op.supports_autograd
    samples: list[Any] = []
    # Some samples only exist for the database's own sizes.
    with suppress(Exception):
        samples.extend(op.sample_inputs("cpu", dtype, requires_grad=differentiable))
    if num_samples is None or len(samples) <= num_samples:
        return samples
    widest = max(samples, key=lambda x: sum(t.ndim for t in _tensors_of(x)))
    return [widest, *random.Random(op.formatted_name).sample(samples, num_samples - 1)]


def _tensors_of(sample: Any) -> list[Tensor]:
    return [t for _, t in judge.extract_tensors_from_sample(sample)]


def _is_testable(called: AtenCall) -> bool:
    if torch.Tag.nondeterministic_seeded in called.func.tags or "empty" in called.func.name():
        return False
    tensors = called.tensors
    if not tensors or any(0 in t.shape or t.layout != torch.strided for t in tensors):
        return False
    results = [x for x in pytree.tree_leaves(called.result) if isinstance(x, Tensor)]
    # Parts of an infinity, given or returned, are no numbers; see docs/guide/dtensor.md.
    if not all(_has_parts(t) for t in (*tensors, *results)):
        return False
    return bool(results) and judge._check_ground_truth(results) is not None


def _has_parts(tensor: Tensor) -> bool:
    """Whether parts some thousands of times as large, as the judge makes them, are finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    largest = 1e-6 * torch.finfo(tensor.dtype).max
    if tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # numbers of eight bits cannot be compared
    return bool((tensor.abs() < largest).all())


def _key(called: AtenCall) -> Any:
    """Return what makes a call different from another one of the same operator."""
    leaves = pytree.tree_leaves((called.args, called.kwargs))
    return called.func, *(
        (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else str(x) for x in leaves
    )
