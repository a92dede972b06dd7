"""One call of an operator on distributed tensors, judged by the same call on plain ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils import _pytree as pytree

from vescale_dtensor import DTensor, GatherWarning, Unsupported, local_shape
from vescale_dtensor._comm.emulation import RankTensor, coordinates_of_ranks
from vescale_dtensor._sharding import replicate_fallback

from .device import DEVICE
from .sweep_cases import Assignment, Placements, Sample, distributed

Kind = Literal[
    "right", "wrong value", "wrong on some rank", "wrong metadata", "refused", "crash", "hang"
]
# Roundings; or the order of dims in memory, of which torch's meta kernels say other things than
# those that compute.
Difference = Literal["bits", "strides"]
Variant = Literal["function", "inplace", "out"]


@dataclass(frozen=True)
class Verdict:
    """What came of a call.

    Attributes:
        kind: The verdict.
        detail: What was expected and what came, or the message of an exception.
        differs: In what a right result differs from the plain operator's.
        gathered: Whether the fallback gathered inputs.
    """

    kind: Kind
    detail: str = ""
    differs: frozenset[Difference] = frozenset()
    gathered: bool = False


class _Wrong(Exception):
    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(detail)
        self.kind: Kind = kind


@dataclass
class Outcome:
    """What came of a call.

    Attributes:
        results: What it returned, and what it wrote.
        gradients: Of the tensors that can have one, None where there is none.
        resizes: Whether empty `out` arguments would do as well.
    """

    results: Any
    gradients: list[Any]
    resizes: bool = False


# Takes the arguments and, for the variant that has it, `out`.
Function = Callable[..., Any]


def plain_outcome(
    function: Function, sample: Sample, variant: Variant, *, differentiate: bool, seed: int = 0
) -> Outcome:
    """Run the operator on one device."""
    tensors = [t.clone() for t in sample.tensors]
    return _run(function, sample, tensors, variant, differentiate, seed, lambda t, _: t)


def _run(
    function: Function,
    sample: Sample,
    tensors: list[Any],
    variant: Variant,
    differentiate: bool,
    seed: int,
    spread: Callable[[Tensor, int], Any],
    out: Any = None,
) -> Outcome:
    if differentiate:
        tensors = [
            t.requires_grad_() if t.dtype.is_floating_point or t.dtype.is_complex else t
            for t in tensors
        ]
    torch.manual_seed(seed)
    used = list(tensors)
    if variant == "inplace":
        used[0] = tensors[0].clone()
    args, kwargs = sample.build(used)
    with torch.set_grad_enabled(differentiate):
        results = function(*args, **kwargs) if out is None else function(*args, **kwargs, out=out)
    if variant == "inplace":
        results = (results, used[0])
    if out is not None:
        results = (results, out)
    wanted = [t for t in tensors if t.requires_grad]
    leaves = [
        leaf
        for leaf in pytree.tree_leaves(results)
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None
    ]
    if not differentiate or not leaves or not wanted:
        return Outcome(results, [])
    generator = torch.Generator().manual_seed(7)
    cotangents = [
        spread(torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device), i)
        for i, x in enumerate(leaves)
    ]
    gradients = torch.autograd.grad(leaves, wanted, cotangents, allow_unused=True)
    return Outcome(results, list(gradients))


def judge(
    function: Function,
    sample: Sample,
    mesh: DeviceMesh,
    assignment: Assignment,
    variant: Variant,
    expected: Outcome,
    *,
    differentiate: bool,
    out: Callable[[], Any] | None = None,
    strides: bool = True,
) -> Verdict:
    """Run the operator on distributed tensors and compare."""
    rtol = max(rtol_of(t) for t in sample.tensors)
    replicate_fallback._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tensors = [
                distributed(t, mesh, p) for t, p in zip(sample.tensors, assignment, strict=True)
            ]

            def spread(cotangent: Tensor, index: int) -> Tensor:
                ndim, dim = cotangent.ndim, index % max(cotangent.ndim, 1)
                placed = (Shard(dim),) if ndim and index % 2 else ()
                whole = (Replicate(),) * (mesh.ndim - len(placed))
                return distributed(cotangent, mesh, (*placed, *whole))

            actual = _run(
                function, sample, tensors, variant, differentiate, 0, spread,
                None if out is None else out(),
            )  # fmt: skip
            found = _compare(expected.results, actual.results, "result", rtol, strides=strides)
            found |= _compare(expected.gradients, actual.gradients, "gradient", rtol)
        except _Wrong as wrong:
            return Verdict(wrong.kind, str(wrong))
        except NotImplementedError as refusal:
            named = isinstance(refusal, Unsupported) or "aten" in str(refusal)
            return Verdict("refused" if named else "crash", _message(refusal))
        except RuntimeError as problem:
            # C++ code of torch that reads elements where no subclass can intervene.
            unread = "its data is not allocated yet" in str(problem)
            return Verdict("refused" if unread else "crash", _message(problem))
        except Exception as problem:
            return Verdict("crash", _message(problem))
    gathered = any(isinstance(each.message, GatherWarning) for each in caught)
    return Verdict("right", differs=frozenset(found), gathered=gathered)


def _message(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"[:600]


def _compare(
    expected: Any, actual: Any, what: str, rtol: float, *, strides: bool = True
) -> set[Difference]:
    """Return in what they differ that is not wrong.

    Raises:
        _Wrong: If something differs by more than rounding.
    """
    wanted, structure = pytree.tree_flatten(expected)
    got, other = pytree.tree_flatten(actual)
    if len(wanted) != len(got) or (structure != other and "gradient" not in what):
        raise _Wrong("wrong metadata", f"{what}: expected {structure}, got {other}")
    found: set[Difference] = set()
    for index, (a, b) in enumerate(zip(wanted, got, strict=True)):
        found |= _compare_leaf(a, b, f"{what} {index}", rtol, strides)
    return found


def _compare_leaf(
    expected: Any, actual: Any, what: str, rtol: float, strides: bool
) -> set[Difference]:
    if not isinstance(expected, Tensor):
        same = expected == actual or (expected != expected and actual != actual)
        close = isinstance(expected, float) and abs(expected - actual) < 1e-9 * abs(expected)
        if type(expected) is not type(actual) or not (same or close):
            raise _Wrong("wrong value", f"{what}: expected {expected!r}, got {actual!r}")
        return set() if same else {"bits"}
    expected = expected.detach()
    if not isinstance(actual, Tensor):
        raise _Wrong("wrong value", f"{what}: expected a tensor, got {actual!r}")
    if not isinstance(actual, DTensor):
        # Autograd's zeros, a plain argument: whole on every rank, as plain tensors are.
        if actual.shape != expected.shape or not alike(actual, expected):
            raise _Wrong("wrong value", f"{what}: a plain tensor {_brief(actual)}")
        return set() if _same_bits(actual.detach(), expected) else {"bits"}
    _compare_metadata(expected, actual, what)
    steps = list(zip(expected.shape, expected.stride(), actual.stride(), strict=True))
    restrided = strides and expected.numel() > 1 and any(n > 1 and a != b for n, a, b in steps)
    found: set[Difference] = {"strides"} if restrided else set()
    with torch.no_grad():
        full = cast(DTensor, actual.detach()).full_tensor()
    assert isinstance(full, RankTensor)
    wanted = expected.resolve_conj().resolve_neg()
    parts = [part.resolve_conj().resolve_neg() for part in full.parts]
    for rank, part in enumerate(parts):
        if part.shape != wanted.shape or part.dtype != wanted.dtype:
            raise _Wrong(
                "wrong metadata",
                f"{what}: expected {_brief(wanted)}, rank {rank} has {_brief(part)}",
            )
        # Kernels of GPUs may add up in any order, another one each time.
        alike_enough = _same_bits if DEVICE == "cpu" else alike
        if rank and not alike_enough(part, parts[0]):
            raise _Wrong("wrong on some rank", f"{what}: rank {rank} differs from rank 0")
    if _same_bits(parts[0], wanted):
        return found
    if not _is_close(parts[0], wanted, rtol):
        raise _Wrong(
            "wrong value", f"{what}: {actual.placements}: {_difference(parts[0], wanted)}"
        )
    return {*found, "bits"}


def _compare_metadata(expected: Tensor, actual: DTensor, what: str) -> None:
    if tuple(actual.shape) != tuple(expected.shape) or actual.dtype != expected.dtype:
        raise _Wrong(
            "wrong metadata", f"{what}: expected {_brief(expected)}, got {_brief(actual)}"
        )
    if tuple(actual._spec.shape) != tuple(expected.shape):
        raise _Wrong("wrong metadata", f"{what}: the layout has shape {actual._spec.shape}")
    mesh = actual.device_mesh
    local = actual._settled()._local_tensor
    assert isinstance(local, RankTensor)
    for rank, (coordinate, part) in enumerate(
        zip(coordinates_of_ranks(mesh), local.parts, strict=True)
    ):
        shape = local_shape(expected.shape, mesh.shape, coordinate, actual.placements)
        if tuple(part.shape) != shape or part.dtype != expected.dtype:
            raise _Wrong(
                "wrong metadata",
                f"{what}: {actual.placements} of {tuple(expected.shape)}: expected a local "
                f"{shape} {expected.dtype}, rank {rank} has {_brief(part)}",
            )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return bool(((a == b) | ((a != a) & (b != b))).all())
    return torch.equal(a, b)


def alike(a: Any, b: Any) -> bool:
    """Whether two results of one operator agree up to rounding."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b = a.detach(), b.detach()
        return a.shape == b.shape and (_same_bits(a, b) or _is_close(a, b))
    return bool(a == b or (a != a and b != b))


def rtol_of(tensor: Tensor) -> float:
    """Return the tolerance for what is made of ``tensor``: sums in another order round anew."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return 0.0
    eps = torch.finfo(tensor.dtype).eps
    return 1e-9 if eps < 1e-10 else 1e-4 if eps < 1e-6 else 2e-2


def _is_close(a: Tensor, b: Tensor, rtol: float = 0.0) -> bool:
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return False
    rtol = max(rtol, rtol_of(b))
    scale = b[b.isfinite()].abs().max().item() if b.isfinite().any() else 0.0
    return torch.allclose(a, b, rtol=rtol, atol=rtol * (1 + scale), equal_nan=True)


def _difference(got: Tensor, wanted: Tensor) -> str:
    if wanted.numel() <= 4:
        return f"expected {wanted.tolist()}, got {got.tolist()}"
    wrong = (got != wanted) & ~((got != got) & (wanted != wanted))
    first = int(wrong.flatten().nonzero()[0].item())
    return (
        f"{int(wrong.sum())} of {wanted.numel()} elements differ, the first at {first}: expected "
        f"{wanted.flatten()[first].item()}, got {got.flatten()[first].item()}"
    )


def _brief(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def outs_of(
    results: Any, mesh: DeviceMesh, placements: Placements, *, resized: bool
) -> Callable[[], Any]:
    """Return what makes `out` arguments for ``results``, empty ones if ``resized``."""

    def out(like: Tensor) -> Tensor:
        shape = (0,) if resized else like.shape
        whole = (Replicate(),) * mesh.ndim
        fresh = torch.full(shape, 3, dtype=like.dtype)
        return distributed(fresh, mesh, placements if like.ndim and not resized else whole)

    return lambda: pytree.tree_map_only(Tensor, out, results)
