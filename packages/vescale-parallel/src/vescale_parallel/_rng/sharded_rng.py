"""Random numbers in forward: every rank draws its part of what one device draws.

[Note: draws] All ranks keep one generator state, that of one device. While a module runs that
draws random numbers, a mode sees what torch is about to draw. A tensor that ranks hold parts of
is drawn in part, by :mod:`vescale_dtensor.random`, which leaves the generator as if the whole had
been drawn; any other is the same on every rank as it is. The mode sits below autograd, so that
it sees what dropout and attention are made of, and gradients are torch's own.

Which dims are cut is found out for every new form of call before it runs, see
:mod:`vescale_parallel._rng.call_forms`. The mode begins and ends with the forward of the very
module that draws: other modules pay a look at what they hold, and one that is run again in
backward, because its activations were not kept, draws the same again. A compiler sees a module
that draws nothing as if it were not wrapped, whatever its name; one that draws is left out.

What cannot be drawn in part (kernels that make their own random numbers, dims that nothing is
known about) is drawn from a stream of this rank's own: right in distribution, but not what one
device draws. A warning names it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor
from vescale_dtensor.random import RandomOperator
from vescale_parallel._cross_replica.context.blocks import SlicedBlocks
from vescale_parallel._model.code import with_own_code
from vescale_parallel._model.fqns import stack_of
from vescale_parallel._model.inputs import usual_rows_dim
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._torch_private import is_in_backward, left_out, pytree
from vescale_parallel._trace.generators import GeneratorStates, generator_state
from vescale_parallel._trace.random_ops import DrawMode, draw_with, drawn_shape
from vescale_parallel._trace.rng_trace import drawn_order

from .attention_masks import AttentionMasks
from .empty_dropout import DrawsForNothing, has_empty
from .known_draws import (
    CallDraws,
    KnownDraws,
    ModuleDraws,
    Place,
    Scope,
    ShardedDraw,
    in_slices,
    mark,
    part_of_draw,
)
from .own_streams import own_position, own_stream
from .part_of_whole import DrawsOfRank
from .whole_masks import dropout_of_whole

# Of a module of which nothing is known but that it draws.
_UNSEEN = Scope(parts={})


class ShardedRng:
    """Draws for one rank of a parallelized model.

    Args:
        place: Where this rank is.
        lengths: How long the cut sequence of each stack of blocks is, kept up to date.
        known: Returns what is known of a call: of a model, with positional and keyword
            arguments, and so many rows. None if ranks draw alike.
        sliced: Blocks that compute on slices of a sequence; None if there are none.

    Attributes:
        is_drawing: Whether a draw is being made; what it is made of counts for no module.
        running: Modules that draw, the innermost one last.
        is_of_all_rows: Tells whether code runs that computes over the batch of all ranks.
        are_rows_uneven: Whether rows may have other numbers of elements of what they pack.
    """

    def __init__(
        self,
        place: Place,
        lengths: Mapping[str, int],
        known: Callable[[nn.Module, Sequence[Any], Mapping[str, Any], int], KnownDraws]
        | None = None,
        sliced: SlicedBlocks | None = None,
    ) -> None:
        self._sliced = sliced
        if sliced is not None:
            sliced.draw_by(self)
        self._place, self._lengths, self._known = place, lengths, known
        self._now = CallDraws({}, 0)
        self._modules: dict[str, ModuleDraws] = {}
        self.is_drawing = self._has_drawn = self._begins_late = self.are_rows_uneven = False
        self._warned: set[str] = set()
        self.running: list[_Drawing] = []
        self.is_of_all_rows: Callable[[], bool] = lambda: False

    def install(self, model: nn.Module, *, compiled: bool = False) -> None:
        """Have modules draw in parts while their forward runs, in place.

        ``compiled`` says whether they are parts of what torch.compile compiles.
        """
        for fqn, module in model.named_modules():
            self._modules[fqn] = ModuleDraws()
            module.forward = self._drawing(module.forward, fqn, self._modules[fqn], compiled)

    @contextlib.contextmanager
    def of_call(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], num_rows: int
    ) -> Iterator[None]:
        """Draw for a call of the model, with so many rows of the batch on this rank."""
        if self._known is None:
            yield
            return
        known = self._known(model, args, kwargs, num_rows)
        scopes = known.scopes
        if scopes is None or self._begins_late:
            scopes = known.otherwise()
        self._begin(CallDraws(scopes, num_rows))
        self._has_drawn = False
        before = generator_state() if not scopes and model.training else None
        yield
        if known.scopes is None and not self._has_drawn:
            known.scopes = {}
        if before is not None and generator_state() != before:
            self._begins_late = True
            warn_at_user_line(
                "forward drew random numbers that neither its earlier calls drew nor the trial "
                "run before them: in this call data-parallel ranks drew the same numbers for "
                "their different rows; from the next call on they draw what one device draws",
            )

    @contextlib.contextmanager
    def of_part(self, index: int, num_parts: int) -> Iterator[None]:
        """Draw for one of several equal parts of this rank's rows, each from the same state."""
        held = self._place
        self._place = replace(
            held,
            num_parts_of_batch=held.num_parts_of_batch * num_parts,
            part_of_batch=held.part_of_batch * num_parts + index,
        )
        try:
            yield
        finally:
            self._place = held

    def as_now(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return what has modules that run again later draw as they do in this call."""
        return functools.partial(self._as_in, self._now)

    @contextlib.contextmanager
    def _as_in(self, call: CallDraws) -> Iterator[None]:
        held = self._now
        self._begin(call)
        try:
            yield
        finally:
            self._begin(held)

    def _begin(self, call: CallDraws) -> None:
        for fqn in self._now.scopes:
            if fqn in self._modules:
                self._modules[fqn].scope = None
        self._now = call
        for fqn, scope in call.scopes.items():
            if fqn in self._modules:
                self._modules[fqn].scope = scope

    def _drawing(
        self, forward: Callable[..., Any], fqn: str, drawn: ModuleDraws, compiled: bool
    ) -> Callable[..., Any]:
        def draw(scope: Scope, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if scope.is_apart:
                # Tensors of the batch of all ranks draw what one device draws.
                is_whole = any(isinstance(x, DTensor) for x in pytree.tree_leaves((args, kwargs)))
                with contextlib.nullcontext() if is_whole else self._apart(fqn):
                    return forward(*args, **kwargs)
            with _Drawing(self, fqn, scope) as mode:
                if not has_empty(args, kwargs):
                    return forward(*args, **kwargs)
                with DrawsForNothing(mode.draw):
                    return forward(*args, **kwargs)

        drawing: Callable[..., Any] = draw
        sliced = self._sliced
        if compiled:
            why = "random numbers are drawn in part, as one device draws them"
            drawing = left_out(draw, why)

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            scope = drawn.scope
            if scope is None and sliced is not None and sliced.draws_in(fqn):
                scope = _UNSEEN
            if scope is None:
                return forward(*args, **kwargs)
            return drawing(scope, args, kwargs)

        return with_own_code(run) if compiled else run

    def draw(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scope: Scope,
        *,
        index: int,
        fqn: str,
    ) -> Any:
        """Run an operator that draws, the ``index``-th in this call of the module ``fqn``."""
        if self.is_drawing:
            # The mode of an enclosing module sees what this one draws with.
            return func(*args, **kwargs)
        self.is_drawing = self._has_drawn = True
        try:
            if any(isinstance(arg, DTensor) for arg in args) or self.is_of_all_rows():
                # In a region: a tensor of the whole batch draws what one device draws, and so does
                # one of its size that is made from nothing.
                return func(*args, **kwargs)
            at = mark(fqn, index)
            shape = drawn_shape(func, args)
            whole_sequence, sliced = self._cut(shape, scope, index, at), None
            if self._sliced is not None:
                part = None if whole_sequence is None else whole_sequence.part
                sliced = self._sliced.drawn(fqn, index, shape, drawn_order(func, args), part)
            cut = in_slices(whole_sequence, sliced)
            if cut is not None and not self._differs(cut):
                return func(*args, **kwargs)
            if cut is not None:
                try:
                    return self._draw_part(func, args, kwargs, cut, stack_of(fqn))
                except NotImplementedError:
                    pass
            self._warn_once(
                at,
                f"{func} at {at!r} draws random numbers that this rank cannot draw its part of; "
                "it draws others than one device would, from a stream of its own. A sharding plan "
                f"can say how they are cut: '{at}': 'Shard(d)'",
            )
            ranks = (self._sliced.size, self._sliced.rank) if self._sliced and sliced else (1, 0)
            with own_stream(own_position(self._place, whole_sequence, *ranks)):
                return func(*args, **kwargs)
        finally:
            self.is_drawing = False

    def masks(self, fqn: str, index: int, rate: float, shape: tuple[int, ...]) -> AttentionMasks:
        """Return the mask of dropout of attention whose blocks ranks have.

        Raises:
            ValueError: If it is not known which rows and heads a rank has.
        """
        any(running.skip(fqn) for running in reversed(self.running))
        at = mark(fqn, index)
        cut = self._cut(shape, self._modules[fqn].scope or _UNSEEN, index, at)
        if cut is None:
            raise ValueError(
                f"context_parallel: it is not known which part of the dropout {at!r} of attention "
                "a rank has; use context_parallel.method 'all_to_all', or set it to 0"
            )
        draws = self._draws(stack_of(fqn))
        return AttentionMasks(draws, cut, rate, len(shape), self.undivided)

    def mark(self) -> Callable[[], None]:
        """Return what has modules that run draw once more what they draw from now on."""
        states, running = GeneratorStates(), [(mode, mode.count) for mode in self.running]

        def back() -> None:
            states.put_back()
            for mode, count in running:
                mode.count = count

        return back

    @contextlib.contextmanager
    def undivided(self) -> Iterator[None]:
        """Have modules draw as if this rank were alone; that counts for no module."""
        held, self.is_drawing = self.is_drawing, True
        try:
            yield
        finally:
            self.is_drawing = held

    def _cut(
        self, shape: tuple[int, ...], scope: Scope, index: int, at: str
    ) -> ShardedDraw | None:
        if index < len(scope.cuts):
            return self._if_alone(scope.cuts[index], shape)
        if scope.is_region and index not in scope.parts:
            return None
        cut = ShardedDraw(**part_of_draw(scope.parts.get(index)))
        if math.prod(shape) == 1 or self._place.num_parts_of_batch == 1:
            return cut
        rows = usual_rows_dim(shape, self._now.num_rows)
        if rows is not None:
            self._warn_once(
                at,
                "it could not be found out along which dim the rows of the batch are in the "
                f"random numbers of shape {shape} that are drawn at {at!r}; taken to be the "
                "first, which is as long as the batch. If it is another, they are not those of "
                "one device",
            )
            return replace(cut, rows=rows)
        return None

    def _if_alone(self, cut: ShardedDraw | None, shape: tuple[int, ...]) -> ShardedDraw | None:
        """Return a cut, None if rows now share a dim in which they were seen alone."""
        if cut is None or cut.rows is None or not (cut.alone or self.are_rows_uneven):
            return cut
        # A block that runs again in backward may be of an earlier call, with other rows.
        of_another = is_in_backward() and not self.are_rows_uneven
        if self._place.num_parts_of_batch == 1 or of_another:
            return cut
        return cut if shape[cut.rows] == self._now.num_rows else None

    def _differs(self, cut: ShardedDraw) -> bool:
        """Whether a rank is to draw something else than it would by itself."""
        is_kept = cut.order is None or cut.order.is_kept
        dims = self._draws("").cut_dims(cut)
        return not is_kept or bool(cut.extents) or any(dim is not None for dim in dims)

    def _draw_part(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        cut: ShardedDraw,
        stack: str,
    ) -> Any:
        if func is torch.ops.aten.native_dropout.default and args[0].device.type != "cpu":
            return dropout_of_whole(args[0], args[1], lambda x: self._draws(stack).part(x, cut))

        def fill(how: RandomOperator, out: Tensor) -> None:
            self._draws(stack).part(out, cut).draw(how.fill, kwargs.get("generator"))

        return draw_with(fill, func, args, kwargs)

    def _draws(self, stack: str) -> DrawsOfRank:
        return DrawsOfRank(self._place, self._now.num_rows, self._lengths.get(stack, 0))

    @contextlib.contextmanager
    def _apart(self, fqn: str) -> Iterator[None]:
        """Draw from a stream of this rank's own in a module, of which ranks draw unequally."""
        self._warn_once(
            fqn,
            f"values decide how many random numbers {fqn!r} draws (for rows that a router picks, "
            "for example), so each rank draws others than one device would, from a stream of its "
            "own",
        )
        with self.undivided(), own_stream(self._place.part_of_batch):
            yield

    def _warn_once(self, at: str, message: str) -> None:
        if at not in self._warned:
            self._warned.add(at)
            warn_at_user_line(message)


class _Drawing(DrawMode):
    """Counts the draws of one call of a module, and has :class:`ShardedRng` do them."""

    def __init__(self, rng: ShardedRng, fqn: str, scope: Scope) -> None:
        super().__init__()
        self._rng, self._fqn, self._scope = rng, fqn, scope
        self.count = 0

    def __enter__(self) -> Any:
        self._rng.running.append(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._rng.running.pop()
        super().__exit__(*exc)

    def skip(self, fqn: str) -> bool:
        """Count a draw that is made otherwise; return whether it is of this module."""
        self.count += fqn == self._fqn
        return fqn == self._fqn

    def draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._rng.is_drawing:  # what an enclosing module draws its part with
            return func(*args, **kwargs)
        index, self.count = self.count, self.count + 1
        return self._rng.draw(func, args, kwargs, self._scope, index=index, fqn=self._fqn)


def draws_in_part(mode: object) -> str:
    """Return why a dispatch mode has a module draw this rank's part, "" if it does not."""
    if not isinstance(mode, _Drawing):
        return ""
    is_known = mode._scope.cuts or mode._scope.parts
    return "its own forward draws random numbers" if is_known else "what it draws is not predicted"
