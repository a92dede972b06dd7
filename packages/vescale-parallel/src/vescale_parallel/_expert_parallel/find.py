"""Which modules of a model stack experts that ranks can share out: found, and proven by running.

[Note: what is proven of experts] That a module is the sum over the slots of a row of weight times
what the expert makes of the row, whichever rows an expert gets with it, and that it runs with some
of its experts alone once certain of its integers count those. Both are tried on random numbers in
float64, gradients included, on the module or one like it of a scaled-down model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.random_copies import InDouble, random_copy
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._trace.generators import untouched_generators
from vescale_parallel._verify.scaled_down_model import scaled_down

from .batched import MOST_NUMEL, BatchedRows, num_batched, proven_batched
from .experts import (
    Combination,
    Experts,
    call_some,
    close,
    combined,
    counts_of,
    needs_rows,
    num_stacked,
    sorted_by_expert,
    subsets,
    weighing_all,
)
from .find_listed import find_listed
from .found import FoundExperts
from .left_behind import draws_in_training
from .near_misses import near_misses

_MAX_NUMEL = 2**22  # of a module that is run itself
_MOST_NUMEL = 2**27  # likewise, where nothing smaller is like it
_NUM_ROWS, _NUM_SLOTS = 24, 3
_TOO_LARGE = "it is too large to be tried, and the model has no configuration of a smaller one"
_HIDDEN = ("hidden_size", "hidden_dim", "dim", "d_model")
Made = tuple[Tensor, ...]


def planned_experts(plan: ParallelPlan, model: nn.Module) -> FoundExperts:
    """Return the modules whose experts ranks share out under a plan; raises as the next one."""
    size, tp = plan.expert_parallel.size, plan.tensor_parallel.size
    if size == 1:
        return FoundExperts()
    found = find_experts(model, size)
    if found.listed and tp > 1:
        raise ValueError(
            f"expected tensor_parallel.size 1 with expert_parallel.size {size} and experts in a "
            f"list, as {found.listed[0].fqn!r} has them, got {tp}; stack them in one module, or "
            "use data_parallel.size for the other ranks"
        )
    drawing = found.drawing
    if drawing and (plan.pipeline_parallel.size > 1 or plan.context_parallel.size > 1):
        raise ValueError(
            f"expert_parallel.size {size}: {drawing!r}, which has experts, draws random numbers "
            "in forward, for dropout for example; with pipeline_parallel or context_parallel it "
            "draws none: set them to 0, or use data_parallel.size for the other ranks"
        )
    return found


def find_experts(model: nn.Module, size: int) -> FoundExperts:
    """Return the modules whose experts ``size`` ranks can share out.

    Raises:
        ValueError: If there are none, or some that are stacked cannot be shared out.
    """
    listed, others = find_listed(model)
    stacked, stacks = _stacked(model, size)
    batched, more = _batched(model, size, beside=[each.fqn for each in stacked])
    stacked, stacks = [*stacked, *batched], stacks | more
    if not stacked and not listed:
        raise ValueError(
            f"expert_parallel.size {size}: found no experts in {type(model).__name__}; leave "
            "expert_parallel out of the plan. Looked for: a module whose parameters all stack "
            "them on their first dim, and whose forward takes rows (tokens, hidden), the experts "
            "of each (tokens, k) and their weights (tokens, k), or as many rows of each expert; "
            "or modules of one structure in an nn.ModuleList, called experts or beside a router "
            "(a parameter with a dim of as many), in the module that calls each with its rows."
            f"{_why_not(model, others, stacks)}"
        )
    return FoundExperts(stacked, listed)


def _stacked(model: nn.Module, size: int) -> tuple[list[Experts], dict[str, str]]:
    """Return the modules that take rows, and why others do not, which may be called otherwise."""
    stacked = {fqn: num_stacked(module) for fqn, module in model.named_modules()}
    known: dict[str, Experts | str] = {}
    found, others = list[Experts](), dict[str, str]()
    scaled: list[nn.Module | None] = []
    for fqn, count in stacked.items():
        if not count:
            continue
        module = model.get_submodule(fqn)
        kind = f"{generalize(fqn)} {count} {type(module)}"
        if count % size:
            if needs_rows(module):
                raise ValueError(_refused_size(fqn, count, size))
            known[kind] = f"expert_parallel.size {size} does not divide its {count} experts"
        if kind not in known:
            subject = _subject(model, fqn, scaled, size)
            named = [*counts_of(module, count)]
            known[kind] = _TOO_LARGE if subject is None else _proven(fqn, subject, size, named)
        like = known[kind]
        if isinstance(like, str) and needs_rows(module):
            raise ValueError(_refusal(fqn, like))
        if isinstance(like, str):
            others[generalize(fqn)] = f"stacks matrices, but {like}"
        else:
            found.append(replace(like, fqn=fqn, num_experts=count))
    return found, others


def _refused_size(fqn: str, count: int, size: int) -> str:
    return (
        f"expert_parallel.size {size} does not divide the {count} experts of {fqn!r}; use "
        f"one of {[n for n in range(1, count + 1) if count % n == 0]}"
    )


def _why_not(model: nn.Module, lists: Mapping[str, str], stacks: dict[str, str]) -> str:
    """Return sentences about what looks like experts, one for modules of one kind."""
    alike = dict.fromkeys((generalize(fqn), said) for fqn, said in lists.items())
    names = [generalize(fqn) for fqn in lists]
    one = {generalize(fqn): fqn for fqn in lists if names.count(generalize(fqn)) == 1}
    near = {generalize(fqn): said for fqn, said in near_misses(model)} | stacks
    return "".join(
        [
            *(
                f" The list {one.get(name, name)!r} is not one of experts: {said}."
                for name, said in alike
            ),
            *(f" {name or type(model).__name__!r} {said}." for name, said in near.items()),
        ]
    )


def _batched(
    model: nn.Module, size: int, *, beside: Sequence[str]
) -> tuple[list[Experts], dict[str, str]]:
    """Return the modules that take as many rows for each expert, and why others do not.

    ``beside`` are those that take rows, the experts of each and their weights.
    """
    found, others = list[Experts](), dict[str, str]()
    known = dict[str, BatchedRows | str]()
    scaled: list[nn.Module | None] = []
    for fqn, module in model.named_modules():
        owner, _, name = fqn.rpartition(".")
        count = num_batched(module, model.get_submodule(owner)) if name else 0
        if not count or fqn in beside:
            continue
        kind = f"{generalize(fqn)} {count} {type(module)}"
        if kind not in known and count % size:
            known[kind] = f"expert_parallel.size {size} does not divide its {count} experts"
        if kind not in known:
            known[kind] = proven_batched(*_tried_in(model, fqn, scaled, size))
        like = known[kind]
        if isinstance(like, str):
            others[generalize(fqn)] = f"stacks matrices, but {like}"
        else:
            found.append(Experts(fqn, count, like.attributes, "slots", like.num_dims, like.draws))
    return found, others


def _tried_in(
    model: nn.Module, fqn: str, scaled: list[nn.Module | None], size: int
) -> tuple[nn.Module, str, int]:
    """Return the module that calls one, or one like it of a scaled-down model if it is large."""
    parent, _, name = fqn.rpartition(".")
    owner = model.get_submodule(parent)
    if sum(p.numel() for p in owner.parameters()) <= MOST_NUMEL:
        return owner, name, size
    few = next(n for n in range(2, size + 1) if size % n == 0)
    if not scaled:
        scaled.append(scaled_down(model, few))
    for other, module in scaled[0].named_modules() if scaled[0] is not None else ():
        alike = generalize(other) == generalize(parent) and type(module) is type(owner)
        if alike and num_batched(module.get_submodule(name), module) % few == 0:
            return module, name, few
    return owner, name, size


def _subject(
    model: nn.Module, fqn: str, scaled: list[nn.Module | None], size: int
) -> nn.Module | None:
    """Return the module to run: itself, or one like it of a scaled-down model if it is large.

    None if it is too large, and nothing is like it. What is like it has fewer experts, which two
    or more ranks can share out if ``size`` can.
    """
    module = model.get_submodule(fqn)
    if sum(p.numel() for p in module.parameters()) <= _MAX_NUMEL:
        return module
    few = next((n for n in range(2, size + 1) if size % n == 0), 1)
    if not scaled:
        scaled.append(scaled_down(model, few))
    for name, other in scaled[0].named_modules() if scaled[0] is not None else ():
        alike = generalize(name) == generalize(fqn) and type(other) is type(module)
        if alike and num_stacked(other) and num_stacked(other) % few == 0:
            return other
    return module if sum(p.numel() for p in module.parameters()) <= _MOST_NUMEL else None


def _proven(fqn: str, module: nn.Module, size: int, named: Sequence[str]) -> Experts | str:
    """Return how a module's experts are shared out, or why they cannot be.

    Args:
        fqn: Of the module.
        module: It, or one like it.
        size: Ranks.
        named: Its integers that may count experts.
    """
    size = math.gcd(size, num_stacked(module))  # a scaled-down model may have fewer than ranks
    with untouched_generators(seed=0), InDouble():
        found = _proven_as(fqn, module, size, named, weighs_all=False)
        if isinstance(found, str):
            other = _proven_as(fqn, module, size, named, weighs_all=True)
            found = found if isinstance(other, str) else other
    return found


def _proven_as(
    fqn: str, module: nn.Module, size: int, named: Sequence[str], *, weighs_all: bool
) -> Experts | str:
    """Return it of a module that is given weights of the experts of a row, or of all experts."""
    count = num_stacked(module)
    try:
        whole = random_copy(module)
        called = _Called(whole, count, weighs_all)
        rows, expected = _one_device(called)
        draws = draws_in_training(whole, called.as_taken(*rows))
    # What a user's module raises is why it is not understood.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    why = ""
    both = [name for name in counts_of(whole, count) if name in named]
    for attributes in subsets(both):
        try:
            made = _shared_out(called, rows, attributes, size)
        except Exception as error:  # these integers were not those, or not all of them
            raised = f"with some of its experts alone it raises {type(error).__name__}"
            why = why or f"{raised}: {error}"
            continue
        why = "its results are not the sum of what each expert makes of a row, by weight"
        if all(map(close, made, expected)):
            order = _combination(called, rows, attributes)
            return Experts(fqn, count, attributes, order, draws=draws, weighs_all=weighs_all)
    return why


def _refusal(fqn: str, why: str) -> str:
    return (
        f"expert_parallel: {fqn!r} stacks experts, but ranks cannot share them out: {why}. Its "
        "forward takes rows (tokens, hidden), the experts of each (tokens, k) and their weights "
        "(tokens, k), and returns the sum over k of weight times expert; otherwise leave "
        "expert_parallel out of the plan"
    )


@dataclass(frozen=True)
class _Called:
    """A module that stacks ``count`` experts, called with rows, experts and weights of each."""

    module: nn.Module
    count: int
    weighs_all: bool

    def as_taken(self, rows_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Made:
        given = rows_TH, index_TK, weights_TK
        return weighing_all(*given, self.count) if self.weighs_all else given

    def __call__(self, *given: Tensor) -> Tensor:
        rows, *others = self.as_taken(*given)
        made: Tensor = self.module(rows, *others)
        if made.shape != rows.shape:
            raise ValueError("what it returns is not of the shape of its rows")
        return made.view(given[0].shape)


def _one_device(called: _Called) -> tuple[Made, Made]:
    """Return rows, experts and weights that a module takes, and what it makes of them."""
    count = called.count
    errors = list[Exception]()
    for hidden in _widths(called.module):
        rows = torch.randn(_NUM_ROWS, hidden, dtype=torch.float64)
        slots = min(_NUM_SLOTS, count)
        index = torch.rand(_NUM_ROWS, count).argsort(1)[:, :slots]
        weights = torch.rand(_NUM_ROWS, slots, dtype=torch.float64) + 0.5
        given = rows, index, weights
        try:
            return given, _with_gradients(called.module, given, called)
        except Exception as error:  # arbitrary modules: of rows of another width
            errors.append(error)
    raise errors[0]


def _widths(module: nn.Module) -> Iterator[int]:
    """Yield how wide rows may be, the likeliest first."""
    named = [getattr(module, name, None) for name in _HIDDEN]
    dims = [dim for p in module.parameters() for dim in p.shape[1:]]
    yield from dict.fromkeys(each for each in [*named, *dims] if isinstance(each, int))


def _with_gradients(module: nn.Module, given: Made, run: Callable[..., Tensor]) -> Made:
    """Return a result and the gradients of rows, weights and parameters."""
    rows, index, weights = given
    rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    result = run(rows, index, weights)
    probe = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
    trained = [rows, weights, *module.parameters()]
    grads = torch.autograd.grad((result * probe).sum(), trained)
    return result.detach(), *grads


def _shared_out(called: _Called, given: Made, attributes: tuple[str, ...], size: int) -> Made:
    def run(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        made = _rows_of_experts(called, rows, index, attributes, size, num_parts=2)
        return combined(made, index, weights, "slots")

    return _with_gradients(called.module, given, run)


def _rows_of_experts(
    called: _Called,
    rows_TH: Tensor,
    index_TK: Tensor,
    attributes: tuple[str, ...],
    size: int,
    num_parts: int,
) -> Tensor:
    """Return what experts make of each row, as ``size`` ranks one after the other.

    Each runs its rows in parts, which have to be what they are together.
    """
    module = called.module
    whole: dict[str, Any] = dict(module._parameters)
    count = next(iter(whole.values())).shape[0]
    order, counts = sorted_by_expert(index_TK, count)
    experts = index_TK.reshape(-1)[order]
    sent = rows_TH[order // index_TK.shape[1]]
    made, pairs = list[Tensor](), list[Tensor]()
    ends = counts.view(size, -1).sum(1).cumsum(0).tolist()
    for rank, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        local = count // size
        parts = {name: p[rank * local : (rank + 1) * local] for name, p in whole.items()}
        try:
            # What forward finds: tensors that autograd leads back to the parameters.
            object.__setattr__(module, "_parameters", parts)
            for first in range(start, min(start + num_parts, end)):
                part = slice(first, end, num_parts)
                mine = experts[part] - rank * local
                run = module, module.forward, attributes, local
                given = sent[part], mine
                made.append(call_some(*run, *given, weighs_all=called.weighs_all))
                pairs.append(order[part])
        finally:
            object.__setattr__(module, "_parameters", whole)
    return torch.cat(made)[torch.cat(pairs).argsort()].view(*index_TK.shape, -1)


def _combination(called: _Called, given: Made, attributes: tuple[str, ...]) -> Combination:
    """Return in which order a module adds up, told by the bits of its result.

    Not all of them: on some processors a row of a product depends on which row it is, and the
    module's own may be others.
    """
    rows, index, weights = given
    with torch.no_grad():
        made = _rows_of_experts(called, rows, index, attributes, 1, num_parts=1)
        expected = called(*given)
        orders: tuple[Combination, ...] = "slots", "ascending"
        return max(
            orders,
            key=lambda order: int((combined(made, index, weights, order) == expected).sum()),
        )
