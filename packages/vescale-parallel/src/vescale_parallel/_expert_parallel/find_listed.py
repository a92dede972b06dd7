"""Which modules of a model hold lists of experts that ranks can share out: found, and proven.

A list of modules of one structure is one of experts if the module that calls them has a router,
which is a parameter with a dim of as many, or is given rows, experts and weights, or if it is
called so. The module is run once in float64 on random numbers, as one device and in two passes
with rows of an expert in parts: results and all gradients have to be the same; see
[Note: two passes].
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.blocks import is_called
from vescale_parallel._model.copies import deep_copied
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.random_copies import InDouble, random_copy
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.generators import generator_state, untouched_generators
from vescale_parallel._verify.scaled_down_model import scaled_down

from .calls_seen import tensors_seen
from .experts import close, has_router, needs_rows, structure, takes_rows
from .left_behind import generators_after, kept, same, what_stays
from .listed import CallsOf, FirstPass, ListedExperts, PlayedBack, first_pass, second_pass

_MOST_NUMEL = 2**26  # of a module that is run
_ROWS, _LENGTH, _NUM_SLOTS = 2, 16, 2
_CHECKPOINTED = (
    "the module that has it calls its experts within torch.utils.checkpoint, which calls them "
    'again in backward; checkpoint that module from outside, or use recompute "full" of the plan'
)
Made = tuple[Tensor, ...]


def find_listed(
    model: nn.Module, layers: Collection[str] = ()
) -> tuple[list[ListedExperts], dict[str, str]]:
    """Return the lists of experts of a model, and why other lists like them are none.

    ``layers`` are modules that run one after the other: what holds them often takes three
    arguments. A list of them is tried, which takes a while, if a router stands beside it.
    """
    found, others = list[ListedExperts](), dict[str, str]()
    known = dict[str, ListedExperts | str]()
    scaled: list[nn.Module | None] = []
    for experts in _candidates(model, layers):
        module = model.get_submodule(experts.fqn)
        kind = f"{generalize(experts.fqn)} {experts.num_experts} {type(module)}"
        if kind not in known:
            known[kind] = _proven(experts, model, scaled)
        like = known[kind]
        if isinstance(like, str):
            others[experts.fqn_of(0).rpartition(".")[0]] = like
        else:
            found.append(replace(like, fqn=experts.fqn))
    return found, others


def _candidates(model: nn.Module, layers: Collection[str] = ()) -> Iterator[ListedExperts]:
    for fqn, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict):
            continue
        has_forward = is_called(container)
        names = _alike(container, beside_others=has_forward)
        if len(names) < 2:
            continue
        parent, _, name = fqn.rpartition(".")
        candidate = (
            ListedExperts(fqn, "", names) if has_forward else ListedExperts(parent, name, names)
        )
        module, owner = model.get_submodule(candidate.fqn), model.get_submodule(parent)
        is_given_rows = candidate.fqn_of(0) not in layers and _has_to_be_given_rows(module)
        is_called_experts = "expert" in name.lower()  # chosen by a hash, or by a router elsewhere
        is_beside_router = has_router(owner, [container], len(names))
        if is_given_rows or is_beside_router or is_called_experts:
            yield candidate


def _has_to_be_given_rows(module: nn.Module) -> bool:
    """Whether forward has three arguments, rather than can be called with as many.

    Models of transformers can: ids, a mask, positions and more.
    """
    return takes_rows(module) and needs_rows(module)


def _alike(container: nn.Module, *, beside_others: bool) -> tuple[str, ...]:
    """Return the names of a list's modules if all have one structure, with parameters.

    ``beside_others`` that have none: dropout that a list with a forward of its own calls.
    """
    held = {name: structure(child) for name, child in container._modules.items() if child}
    alike = {name: each for name, each in held.items() if each[1]}
    is_whole = beside_others or len(alike) == len(container._modules)
    return (*alike,) if is_whole and len({*alike.values()}) == 1 else ()


def _proven(
    experts: ListedExperts, model: nn.Module, scaled: list[nn.Module | None]
) -> ListedExperts | str:
    """Return how a module calls its experts, or why they cannot be shared out."""
    module = model.get_submodule(experts.fqn)
    owner = _owner(model, experts)
    if _is_tied(model, experts):
        return "an expert and something else share a parameter"
    if _numel(module) > _MOST_NUMEL:
        smaller = _smaller(experts, model, scaled)
        if smaller is None:
            return (
                "it is too large to be tried, and the model has no configuration of a smaller one"
            )
        module, owner = smaller
    with untouched_generators(seed=0), InDouble(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a checkpoint warns of inputs without gradients
        copied = random_copy(module)
        try:
            given = _inputs(experts, copied, owner)
        except Exception as error:  # of any kind: of code that is called with what it is not for
            kind = type(module).__name__
            missing = f" ({error})" if isinstance(error, TypeError) else ""
            return f"{kind}, which has it, does not take rows of features alone{missing}"
        try:
            proven = _tried(experts, copied, given)
        # What a user's module raises is why it is not understood.
        except Exception as error:
            if "torch.utils.checkpoint" in str(error):
                return _CHECKPOINTED
            return f"{type(error).__name__}: {error}"
    is_itself = module is model.get_submodule(experts.fqn)
    if isinstance(proven, str) or is_itself or proven.width is proven.made_width is None:
        return proven
    return "it is too large to be tried, and its experts change how wide rows are"


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _smaller(
    experts: ListedExperts, model: nn.Module, scaled: list[nn.Module | None]
) -> tuple[nn.Module, nn.Module | None] | None:
    """Return a smaller module like the one that has the list, and what calls it."""
    if not scaled:
        scaled.append(scaled_down(model, 1))
    if scaled[0] is None:
        return None
    for each in _candidates(scaled[0]):
        if generalize(each.fqn) == generalize(experts.fqn) and each.names == experts.names:
            return scaled[0].get_submodule(each.fqn), _owner(scaled[0], each)
    return None


def _owner(model: nn.Module, experts: ListedExperts) -> nn.Module | None:
    """Return the module that calls what has the list, with more than rows; None if none can."""
    parent = model.get_submodule(experts.fqn.rpartition(".")[0])
    has_forward = experts.fqn and is_called(parent)
    return parent if has_forward and _numel(parent) <= _MOST_NUMEL else None


def _is_tied(model: nn.Module, experts: ListedExperts) -> bool:
    module = model.get_submodule(experts.fqn)
    own = [id(p) for expert in experts.modules_of(module) for p in expert.parameters()]
    names = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    return any(names.count(each) > 1 for each in {*own})


def _tried(experts: ListedExperts, module: nn.Module, given: Made) -> ListedExperts | str:
    """Run a copy of a module as one device and as ranks; return how it calls, or what differs."""
    watched = _Watched(experts, module)
    with untouched_generators(seed=0):
        expected = watched.run(given)
    if watched.why:
        return watched.why
    hidden = given[0].shape[-1]
    proven = replace(
        experts,
        last=frozenset(watched.after - watched.before),
        width=None if watched.width == hidden else watched.width,
        made_width=None if watched.made_width == watched.width else watched.made_width,
    )
    copied = deep_copied(module)
    why = what_stays(copied, experts.modules_of(copied), given)
    if why:
        return why
    proven = _drawing(proven, module, given)
    with untouched_generators(seed=0):
        made = _with_gradients(module, given, _twice(proven, module))
    if not all(map(close, made, expected)):
        return "its results are not those of its experts, each run on rows of its own"
    return _in_training(proven, module, given) or proven


def _drawing(experts: ListedExperts, module: nn.Module, given: Made) -> ListedExperts:
    """Return experts of which it is known who draws random numbers."""
    own = _beside(experts, module)
    inside = [each for each in module.modules() if each not in own]
    with untouched_generators(seed=0):
        nothing = generator_state()
    without = generators_after(module, (), given)
    return replace(
        experts,
        draws=without != nothing or generators_after(module, own, given) != nothing,
        experts_draw=generators_after(module, inside, given) != without,
    )


def _beside(experts: ListedExperts, module: nn.Module) -> list[nn.Module]:
    """Return a module and those in it that are in no expert."""
    inside = {each for expert in experts.modules_of(module) for each in expert.modules()}
    return [each for each in module.modules() if each not in inside]


def _in_training(experts: ListedExperts, module: nn.Module, given: Made) -> str:
    """Return what differs between two calls in training and two of two passes; empty if nothing.

    Experts are not in training, as what they draw is not one device's.
    """
    runs = list[tuple[Made, Made, list[Any], Any]]()
    for num_passes in (1, 2):
        copied = deep_copied(module)
        for each in _beside(experts, copied):
            each.training = True
        run = copied if num_passes == 1 else _twice(experts, copied)
        with untouched_generators(seed=0):
            made = [_with_gradients(copied, given, run) for _ in range(2)]
            inside = {x for each in experts.modules_of(copied) for x in each.modules()}
            state = kept(copied, beside=inside)
            runs.append((made[0], made[1], state, generator_state()))
    (first, second, state, drawn), (*made, state_after, drawn_after) = runs
    if drawn != drawn_after or not all(map(close, (*made[0], *made[1]), (*first, *second))):
        return "its results in training are not those of its experts, each run on rows of its own"
    if not same(state, state_after):
        return "its forward writes to its buffers, or keeps something, otherwise in two passes"
    return ""


def _inputs(experts: ListedExperts, module: nn.Module, owner: nn.Module | None) -> Made:
    """Return what a module can be called with: rows, or what its owner gives it."""
    errors = list[Exception]()
    for hidden in _widths(experts, module):
        rows = torch.randn(_ROWS, _LENGTH, hidden, dtype=torch.float64)
        flat = rows.view(-1, hidden)
        tries: list[Made] = [(rows,), (flat,)]
        if takes_rows(module):
            index = torch.rand(len(flat), experts.num_experts).argsort(1)[:, :_NUM_SLOTS]
            tries = [(flat, index, torch.rand(index.shape, dtype=torch.float64) + 0.5)]
        for given in tries:
            try:
                with torch.no_grad():
                    module(*given)
            except Exception as error:  # arbitrary modules: of rows of another width or shape
                errors.append(error)
            else:
                return given
    if owner is not None:
        name = experts.fqn.rpartition(".")[-1]
        seen = tensors_seen(owner, name, _widths(experts, module))
        if seen:
            return seen
    raise errors[0]


def _widths(experts: ListedExperts, module: nn.Module) -> list[int]:
    expert = experts.modules_of(module)[0]
    dims = [dim for p in expert.parameters() for dim in reversed(p.shape)]
    return [*dict.fromkeys(dims)]


@dataclass(eq=False)
class _Watched:
    """Which of a module's children are called before its last expert, and which after it."""

    experts: ListedExperts
    module: nn.Module
    before: set[str] = field(default_factory=set[str])
    after: set[str] = field(default_factory=set[str])
    width: int = 0
    made_width: int = 0
    why: str = "its forward does not call its experts"

    def run(self, given: Made) -> Made:
        experts = self.experts.modules_of(self.module)
        hooks = [expert.register_forward_hook(self._called) for expert in experts]
        hooks += [
            child.register_forward_pre_hook(functools.partial(self._called_outside, name))
            for name, child in self.module.named_children()
            if child not in experts
        ]
        try:
            return _with_gradients(self.module, given, self.module)
        finally:
            for hook in hooks:
                hook.remove()

    def _called_outside(self, name: str, _child: nn.Module, _args: Any) -> None:
        self.after.add(name)

    def _called(self, expert: nn.Module, args: Any, made: Any) -> None:
        self.before |= self.after
        self.after.clear()
        if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(made, Tensor):
            self.why = "its experts are not called with one tensor, or return no tensor"
            return
        rows: Tensor = args[0]
        if rows.shape[:-1] != made.shape[:-1]:
            self.why = "its experts do not return a row for each row that they are called with"
            return
        self.width, self.made_width, self.why = rows.shape[-1], made.shape[-1], ""


def _twice(experts: ListedExperts, module: nn.Module) -> Callable[..., Any]:
    return lambda *given: _in_two_passes(experts, module, given)


def _in_two_passes(experts: ListedExperts, module: nn.Module, given: Made) -> Any:
    forward = module.forward
    noted = first_pass(module, forward, experts, given, {})
    modules = experts.modules_of(module)
    runs = [expert.forward for expert in modules]
    played = PlayedBack(experts.fqn, _made(experts, noted, runs))
    try:
        for index, expert in enumerate(modules):
            expert.forward = lambda rows, index=index: played.take(index, rows)
        return second_pass(module, forward, experts, noted, given, {})
    finally:
        for expert in modules:
            del expert.forward


def _made(experts: ListedExperts, noted: FirstPass, runs: list[Callable[..., Tensor]]) -> CallsOf:
    """Return what experts make of their rows, run in two parts."""
    made: CallsOf = []
    for run, calls in zip(runs, noted.calls, strict=True):
        of_calls = list[Tensor]()
        for rows in calls:
            flat = rows.reshape(-1, rows.shape[-1])
            parts = [run(part) for part in (flat[::2], flat[1::2]) if len(part)]
            width = experts.made_width or rows.shape[-1]
            order = torch.cat([torch.arange(len(flat))[::2], torch.arange(len(flat))[1::2]])
            whole = torch.cat(parts)[order.argsort()] if parts else flat.reshape(0, width)
            of_calls.append(whole.view(*rows.shape[:-1], width))
        made.append(of_calls)
    return made


def _with_gradients(module: nn.Module, given: Made, run: Callable[..., Any]) -> Made:
    """Return results and the gradients of inputs and parameters."""
    given = tuple(
        each.clone().requires_grad_() if each.is_floating_point() else each for each in given
    )
    leaves = pytree.tree_leaves(run(*given))
    results = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    total = torch.zeros((), dtype=torch.float64)
    for result in results:
        probe = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
        total = total + (result * probe).sum()
    trained = [each for each in (*given, *module.parameters()) if each.requires_grad]
    grads = torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True)
    return tuple(result.detach() for result in results) + grads
