"""One forward of a whole model that is watched: where it attends, and where it draws."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_parallel._model.blocks import name_of, sequence_stacks
from vescale_parallel._model.structures import flattened
from vescale_parallel._torch_private import unseen_functions
from vescale_parallel._trace.random_ops import DrawMode, drawn_shape
from vescale_parallel._trace.rng_trace import drawn_order

from .attention.heads import ARGUMENTS
from .attention.intercept import AttentionMode
from .attention.interface import interface_of
from .attention.lengths import LengthMode
from .attention.products import ProductMode
from .behind import WatchBehind, is_token_wise
from .draws import DrawKey, WholeDraw
from .leaving import Place, around_one_stack, shapes_of
from .slicing import activation_of, is_activation

_ROWS = 3  # dims of activations (batch, sequence, features)


class ForwardWatch:
    """Notes of one forward.

    Attributes:
        attending: Blocks that called attention.
        given_none: Blocks that were called without activations.
        modules: The innermost modules in them that did.
        draws: By stack of blocks, what was drawn between its beginning and its end, where
            activations are slices. None for one module's numbers of several shapes.
        in_attention: Which draws these modules had attention make, by module.
        returned: Shapes of what blocks returned, and modules around them.
        unequal: Of these modules, those with keys of another length than queries.
        returned_at: By stack, the place among what a block returned of what the next was given.
        last: The name of the stack that ran last.
        num_passes: How often each stack ran.
        multiplying: By block, the innermost modules that multiplied activations with each other,
            as attention that is written out does.
        steered: Modules whose code compared how many positions there are with other numbers.
        given: Shapes of what modules were given.
        token_wise: Whether modules returned one tensor of the positions of the one they were
            given.
        behind: What is called behind the last stack.
    """

    def __init__(self) -> None:
        self.attending: set[str] = set()
        self.given_none: set[str] = set()
        self.modules: set[str] = set()
        self.draws: dict[str, dict[DrawKey, WholeDraw | None]] = {}
        self.in_attention: dict[str, set[tuple[str, int]]] = {}
        self.returned: dict[Place, tuple[int, ...]] = {}
        self.unequal: set[str] = set()
        self.returned_at: dict[str, int] = {}
        self.last: str | None = None
        self.num_passes = Counter[str]()
        self.multiplying: dict[str, set[str]] = {}
        self.steered: set[str] = set()
        self.given: dict[Place, tuple[int, ...]] = {}
        self.token_wise: dict[str, bool] = {}
        self.behind = WatchBehind()
        self._block: str | None = None
        self._length, self._joined = 0, 0  # of what a block is given first, and of all joined
        self._left: list[Any] = []  # what the last block returned
        self._stack: str | None = None
        self._attends: str | None = None
        # Modules that run, each with how often it has drawn.
        self._within: list[tuple[str, list[None]]] = []

    def run(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Run a model that is thrown away afterwards."""
        stacks = sequence_stacks(model)
        for fqn in around_one_stack(model, stacks):
            hook = _unseen(functools.partial(self._note_returned, fqn))
            model.get_submodule(fqn).register_forward_hook(hook)
        for stack in stacks:
            for fqn in stack:
                self._follow(model.get_submodule(fqn), fqn, stack)
        for fqn, module in model.named_modules():
            self._follow_within(module, fqn)
        products = ProductMode({id(x) for x in model.parameters()}, self._note_product)
        lengths = LengthMode(self._length_now)
        noting = _Noting(self)
        with torch.no_grad(), interface_of(self), AttentionMode(self), products, noting, lengths:
            model(*args, **kwargs)

    def _length_now(self) -> tuple[int, Callable[[], None]]:
        is_in_block = self._block is not None and self._attends is None
        length = self._length if is_in_block else self.behind.length_now
        return length, functools.partial(self.steered.add, self._within[-1][0] if length else "")

    def scaled_dot_product(self, *args: Any, **kwargs: Any) -> Any:
        """Note ``F.scaled_dot_product_attention``, which computes what it does."""
        given = dict(zip(ARGUMENTS, args, strict=False)) | kwargs
        with self._attending(given["query"], given["key"]):
            return F.scaled_dot_product_attention(*args, **kwargs)

    def of_interface(
        self, function: Callable[..., Any], name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Note a function of transformers' attention interface, likewise."""
        with self._attending(args[1], args[2]):
            return function(*args, **kwargs)

    def wants(self) -> bool:
        """Whether to be told of attention that is called now."""
        return True

    def _note_product(self, factors: Sequence[Tensor]) -> None:
        """Note one with the positions of the block in a dim, which experts have in none."""
        has_positions = any({self._length, self._joined} & {*x.shape} for x in factors)
        if self._block is not None and self._attends is None and has_positions:
            self.multiplying.setdefault(self._block, set()).add(self._within[-1][0])

    def note_draw(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note what an operator is about to draw."""
        fqn, drawn = self._within[-1]
        index, shape = len(drawn), drawn_shape(func, args)
        drawn.append(None)
        if self._stack is None:
            self.behind.note_draw()
            return
        if self._attends is not None:
            self.in_attention.setdefault(self._attends, set()).add((fqn, index))
        noted = self.draws.setdefault(self._stack, {})
        whole = WholeDraw(shape, drawn_order(func, args))
        key = fqn, index, len(shape)
        noted[key] = whole if noted.get(key, whole) == whole else None

    @contextlib.contextmanager
    def _attending(self, query: Tensor, key: Tensor) -> Iterator[None]:
        held = self._attends
        if self._block is not None and held is None:
            self._attends = self._within[-1][0]
            self.attending.add(self._block)
            self.modules.add(self._attends)
            if query.shape[-2] != key.shape[-2]:
                self.unequal.add(self._attends)
        try:
            yield
        finally:
            self._attends = held

    def _follow(self, block: nn.Module, fqn: str, stack: Sequence[str]) -> None:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            if fqn == stack[0]:
                self._stack = name_of(stack)
            self._block = fqn
            leaves = flattened((args, kwargs))[0]
            at = activation_of(leaves)
            first = None if at is None else leaves[at]
            if first is None:
                self.given_none.add(fqn)
            lengths = [x.shape[1] for x in leaves if is_activation(x) and x.ndim == _ROWS]
            self._length = first.shape[1] if first is not None and first.ndim > 1 else 0
            self._joined = sum(lengths)
            places = [at for at, x in enumerate(self._left) if x is first and x is not None]
            if places and fqn != stack[0]:
                self.returned_at.setdefault(name_of(stack), places[0])

        def end(_: nn.Module, args: Any, output: Any) -> None:
            self._block, self._left = None, flattened(output)[0]
            self._note_returned(fqn, _, args, output)
            if fqn == stack[-1]:
                self._stack, self.last = None, name_of(stack)
                self.num_passes[self.last] += 1
                at = self.returned_at.get(name_of(stack), 0)
                self.behind.end_stack(name_of(stack), fqn, self._left[at:] or self._left)
                self._left = []

        block.register_forward_pre_hook(_unseen(begin), with_kwargs=True)
        block.register_forward_hook(_unseen(end))

    def _note_returned(self, fqn: str, _: nn.Module, args: Any, output: Any) -> None:
        self.returned.update(shapes_of(fqn, flattened(output)[0]))

    def _follow_within(self, module: nn.Module, fqn: str) -> None:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            self._within.append((fqn, []))
            self.given.update(shapes_of(fqn, flattened((args, kwargs))[0]))
            if self._stack is None:
                self.behind.begin(fqn)

        def end(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._within.pop()
            is_alike = is_token_wise(args, kwargs, output)
            self.token_wise[fqn] = is_alike and self.token_wise.get(fqn, True)
            self.behind.end(fqn, module, args, kwargs, output)

        module.register_forward_pre_hook(_unseen(begin), with_kwargs=True)
        module.register_forward_hook(_unseen(end), with_kwargs=True)


def _unseen(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that looks at sizes itself, which modes are not to take for the model's."""

    def run(*args: Any) -> None:
        with unseen_functions():
            hook(*args)

    return run


class _Noting(DrawMode):
    """Tells a watch what is drawn."""

    def __init__(self, watch: ForwardWatch) -> None:
        super().__init__()
        self._watch = watch

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._watch.note_draw(func, args)
        return func(*args, **kwargs)


def noted_outputs(module: nn.Module) -> dict[str, Tensor]:
    """Return what will hold the first tensor of the first output of every module, as they end."""
    found: dict[str, Tensor] = {}

    def note(fqn: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(_: nn.Module, args: Any, output: Any) -> None:
            tensors = (x for x in flattened(output)[0] if isinstance(x, Tensor))
            if fqn not in found and (first := next(tensors, None)) is not None:
                found[fqn] = first.detach()

        return after

    for fqn, each in module.named_modules():
        each.register_forward_hook(note(fqn))
    return found


def module_that_raised(error: Exception, model: nn.Module) -> str:
    """Return the name of the innermost module of a model in whose code an error was raised."""
    names = {id(module): fqn for fqn, module in model.named_modules()}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    found = [names[at] for frame in frames if (at := id(frame.f_locals.get("self"))) in names]
    return found[-1] if found and found[-1] else type(model).__name__
