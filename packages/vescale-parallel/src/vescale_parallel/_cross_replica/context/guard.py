"""Calls of a model on slices of its sequence: every form of call is compared with one device."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.batches.small_batches import within
from vescale_parallel._cross_replica.context.reach.all_blocks import of_all_blocks
from vescale_parallel._cross_replica.context.reach.seen_by_hooks import (
    JudgesSlices,
    SlicedLeaves,
    heard_on_slices,
    part_of,
)
from vescale_parallel._model.blocks import alike_parameters, blocks_of, sequence_stacks
from vescale_parallel._model.code import refuse_one_graph
from vescale_parallel._model.copies import copied_without_values, plain
from vescale_parallel._model.inputs import bind, opened, small_examples
from vescale_parallel._tensor_parallel.hooks.axis import HookedCall
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.calls.call_signature import CallForms
from vescale_parallel._verify.calls.flags import Flags, flags_of, set_flags
from vescale_parallel._verify.calls.seen_activations import SeenActivations, judged, like_blocks
from vescale_parallel._verify.scaled_down_model import is_large, scaled_down
from vescale_parallel._verify.threads import in_fresh_thread

from .attending import NotRunError, NotSlicedError
from .attention.intercept import LEFT_OUT
from .blocks import Between, SlicedBlocks
from .conversions import with_whole_gradient
from .proof import DrawsBy, proven_slicing
from .slices import ContextRanks, Method
from .slicing import LEAVE_OUT, ShortSequenceError, Slicing

# Elements of which every rank of a machine has the values and all gradients, in float64, at once.
_MAX_NUMEL = 2**27


_Form = tuple[str, tuple[int, ...], Flags]


@dataclass(frozen=True)
class _Compared:
    """What a form of call was compared on.

    Attributes:
        named: Its arguments, of few rows.
        slicing: What was sliced, in the model that was compared.
    """

    named: Mapping[str, Any]
    slicing: Slicing


class ContextGuard:
    """Runs calls of a model on slices once they are known to give one device's numbers.

    Args:
        model: Still whole; what a check needs of it is copied.
        size: How many ranks share a sequence.
        batch: An example, whose form of call is compared now; None to wait for a call.
        draws_by: Makes what has the modules of a rank draw its part.
        method: How they attend.
        outputs: What calls that are differentiated return; see the plan.

    Raises:
        ValueError: If a model on slices of the example is another function.
    """

    def __init__(
        self,
        model: nn.Module,
        size: int,
        batch: Any,
        draws_by: DrawsBy,
        method: Method = "all_to_all",
        outputs: Literal["loss", "whole"] = "loss",
    ) -> None:
        self._method: Method = method
        self._only_loss = outputs == "loss"
        self._draws_by = draws_by
        self._forms, self._size, self._class = CallForms(model), size, type(model).__name__
        self._whole, self._cache_place = copied_without_values(model), _cache_place(model)
        self._caches = getattr(getattr(model, "config", None), "use_cache", False)
        # Accumulation changes the classes of blocks, by which stacks are found.
        self._stacks = sequence_stacks(model)
        within = tuple(f"{stack[0]}." for stack in self._stacks if len(stack) == 1)
        self._units = frozenset(fqn for fqn in blocks_of(model) if fqn.startswith(within))
        self._known: dict[_Form, Slicing] = {}
        self._compared: dict[_Form, _Compared | None] = {}
        self._latest: _Compared | None = None
        self._seen: dict[object, SlicedLeaves] = {}
        self._model = model
        self._blocks: SlicedBlocks | None = None
        self._ranks: ContextRanks | None = None
        if batch is not None:
            args, kwargs = bind(model, opened(batch))
            args, kwargs = self.without_cache(args, kwargs)
            self._slicing(args, kwargs)

    def install(
        self,
        model: nn.Module,
        ranks: ContextRanks,
        *,
        compiled: bool = False,
        between: Between | None = None,
    ) -> SlicedBlocks:
        """Have the blocks of a model compute on slices, in place; return them.

        ``compiled`` says whether torch.compile compiles what their forwards are now, ``between``
        which positions of a slice blocks hand on, if not all.
        """
        self._ranks = ranks
        self._blocks = SlicedBlocks(ranks, self._method, compiled=compiled, between=between)
        self._blocks.install(model, self._stacks, self._units)
        self._blocks.behind.returns_all = not self._only_loss
        self._model = model
        return self._blocks

    @contextlib.contextmanager
    def proven(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[None]:
        """Compare a call of a new form with one device, and run the call inside.

        Raises:
            ValueError: If the model on slices is another function.
        """
        assert self._blocks is not None
        slicing = self._slicing(args, kwargs)
        refuse_one_graph(self._model, slicing.attending | slicing.shown.modules, LEFT_OUT)
        self._blocks.slice_as(slicing)
        yield

    def _slicing(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slicing:
        named = self._forms.named(args, kwargs)
        form = self._forms.form(args, kwargs), _equal_lengths(named), flags_of(self._model)
        if form not in self._known:
            named = pytree.tree_map_only(Tensor, plain, named)
            try:
                self._known[form] = self._proven_on_few(named)
                self._compared[form] = self._latest
            except ShortSequenceError:
                return Slicing()  # it runs whole, and says nothing of longer ones
            except NotSlicedError as error:
                raised = f". It raised {error.raised}" if error.raised else ""
                raise ValueError(
                    f"context_parallel.size {self._size}: {self._class} is not one device's on "
                    f"slices of its sequence, in calls with ({form[0]}): {error}. Blocks may mix "
                    "positions by F.scaled_dot_product_attention (batch, heads, positions, "
                    "features), transformers' attention interface, nn.MultiheadAttention, or "
                    f"products of queries with keys; or {LEAVE_OUT}{raised}"
                ) from error
        return self._known[form]

    def seen_slices(self, call: HookedCall) -> SlicedLeaves:
        """Return how what hooks of modules are given lies over ranks, in calls of this form."""
        named = self._forms.named(call.args, call.kwargs)
        form = self._forms.form(call.args, call.kwargs), _equal_lengths(named)
        key = (*form, flags_of(self._model))
        hooked = (*key, call.fqns, call.backward)
        if hooked not in self._seen:
            self._seen[hooked] = {}  # of a sequence that is too short to be shared
            if (few := self._compared.get(key)) is not None:
                find = functools.partial(self._find_seen, few, call.fqns, call.backward)
                self._seen[hooked] = in_fresh_thread(find, of=self._whole or nn.Module())
        return self._seen[hooked]

    def _find_seen(
        self, few: _Compared, fqns: Collection[str], backward: Collection[str]
    ) -> SlicedLeaves:
        def listener(model: nn.Module, is_whole: bool) -> SeenActivations:
            names = [fqn for fqn, _ in model.named_modules()]
            of_forward, of_backward = like_blocks(fqns, names), like_blocks(backward, names)
            return SeenActivations(of_forward, of_backward, part_of)

        assert self._whole is not None
        subject = self._subject(self._whole)
        set_flags(subject, self._model)
        found = few.named, few.slicing, self._size, listener
        try:
            whole, ranks, slices = heard_on_slices(
                subject, *found, draws_by=self._draws_by, method=self._method
            )
        except NotSlicedError:
            return {}  # what hooks see is said to be a part
        return judged({*fqns}, whole, ranks, JudgesSlices(slices))

    def _proven_on_few(self, named: Mapping[str, Any]) -> Slicing:
        """Compare on as few rows as the model runs on; see [Note: groups of rows]."""
        errors: list[NotRunError] = []
        for few in small_examples(named):
            small = pytree.tree_map_only(Tensor, Tensor.cpu, few)
            try:
                prove = functools.partial(self._prove, small)
                return in_fresh_thread(prove, of=self._whole or nn.Module())
            except NotRunError as error:
                errors.append(error)
        raise errors[0]

    def _prove(self, named: Mapping[str, Any]) -> Slicing:
        whole = self._whole
        if whole is None:
            raise NotSlicedError("it cannot be copied, and so not compared with one device")
        subject = self._subject(whole)
        if is_large(whole) and (numel := _numel_of_few(subject)) > _MAX_NUMEL:
            raise NotSlicedError(
                f"it is too large to be compared with one device ({numel:,} elements with one "
                f"block of each list, at most {_MAX_NUMEL:,}), and has no configuration of "
                "transformers to make a smaller one of"
            )
        set_flags(subject, self._model)
        smaller = within(subject, dict(named))
        found = proven_slicing(
            subject,
            smaller,
            self._size,
            draws_by=self._draws_by,
            method=self._method,
            behind=self._only_loss,
        )
        self._latest = _Compared(smaller, found)
        return found if subject is whole else of_all_blocks(found, subject, whole)

    def _subject(self, whole: nn.Module) -> nn.Module:
        """Return what is compared of a model."""
        return (scaled_down(whole, 1) or whole) if is_large(whole) else whole

    def completed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments without a cache, with gradients of whole sequences."""
        given = self.without_cache(args, kwargs)
        if not torch.is_grad_enabled():
            return given
        return pytree.tree_map_only(Tensor, self._with_whole_gradient, given)

    def _with_whole_gradient(self, x: Tensor) -> Tensor:
        if not x.requires_grad or self._ranks is None:
            return x
        return with_whole_gradient(x, self._ranks)

    def without_cache(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call's arguments without a cache of keys and values: a rank has slices.

        Raises:
            ValueError: If the call asks for one, or means something else without one.
        """
        if self._cache_place is None:
            return args, kwargs
        named = self._forms.named(args, kwargs)
        if named.get("use_cache") or named.get("past_key_values") is not None:
            raise ValueError(
                f"context_parallel.size {self._size} keeps no cache of keys and values, of which "
                "a rank has slices; call the model with use_cache=False"
            )
        if "use_cache" in kwargs or len(args) > self._cache_place:
            return args, kwargs
        if self._caches and "position_ids" in named and "attention_mask" not in named:
            # Without a cache transformers reads from positions where packed documents begin.
            raise ValueError(
                f"context_parallel.size {self._size} keeps no cache of keys and values, and "
                "without one position_ids say where documents begin, with one they do not; call "
                "the model with use_cache=False for documents, or with an attention_mask"
            )
        return args, {**kwargs, "use_cache": False}


def _numel_of_few(model: nn.Module) -> int:
    """Return how many elements are compared of a model that is large."""
    alike = alike_parameters(model)
    return sum(each.numel() for each in model.parameters() if id(each) not in alike)


def _equal_lengths(named: Any) -> tuple[int, ...]:
    """Return which arguments are as long as which others, by the number of the first of them.

    What is along the sequence is told by its length. Two sequences, of an encoder and a decoder,
    are of one length in some calls alone.
    """
    leaves = pytree.tree_leaves(named)
    lengths = [x.shape[1] for x in leaves if isinstance(x, Tensor) and x.ndim > 1]
    return tuple(map(lengths.index, lengths))


def _cache_place(model: nn.Module) -> int | None:
    """Return which argument of a model says whether it keeps a cache, None if none does."""
    names = [*inspect.signature(model.forward).parameters]
    return names.index("use_cache") if "use_cache" in names else None
