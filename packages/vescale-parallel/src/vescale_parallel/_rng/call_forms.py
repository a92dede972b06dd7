"""Know how random numbers are cut in every form of call of a model, before it runs in it.

A batch of a few rows, made from that of the call, is run together with one that has all of them
twice. A dim that is twice as long then is along the batch; where the rows share it with something
else, :mod:`.row_order` finds out how they lie. A dim that is shorter on one of several
tensor-parallel ranks is cut over these.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._cross_replica.batches.graphs import graph_batches
from vescale_parallel._cross_replica.batches.small_batches import some_rows, within
from vescale_parallel._cross_replica.borders import Rows, rows_dim
from vescale_parallel._cross_replica.call_guard import RowGuard
from vescale_parallel._cross_replica.dims.bounds import Bounds
from vescale_parallel._cross_replica.dims.row_counts import RowDims, num_nodes_of
from vescale_parallel._cross_replica.parts import NUM_ROWS
from vescale_parallel._cross_replica.runs import RowCheckError
from vescale_parallel._model.copies import deep_copied, pairs, plain
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.inputs import children_of, map_children
from vescale_parallel._model.random_copies import InDouble, scaled_copy
from vescale_parallel._tensor_parallel.tensor_sharding import TensorSharding
from vescale_parallel._torch_private import pytree
from vescale_parallel._trace.dry_run import DryRunError
from vescale_parallel._trace.fake_tensors import ObservationError
from vescale_parallel._verify.threads import in_fresh_thread

from .known_draws import KnownDraws, Scope, ShardedDraw, common
from .predict import (
    Draw,
    Given,
    Noted,
    cuts_of_example,
    drawn_by_shape,
    scopes_apart,
    scopes_of,
    scopes_of_unknown,
)
from .row_order import draws_with_values, order_of_rows, twice_over

_NUM_ROWS = NUM_ROWS // 2  # of the smaller one of two batches

Cuts = Mapping[Draw, ShardedDraw | None]


class DrawForms:
    """Finds out, once for each form of call, which random numbers it draws and how they are cut.

    Without parts of the batch it does not matter where its rows are, and what an example shows is
    enough.
    """

    def __init__(
        self,
        model: nn.Module,
        guard: RowGuard,
        example: Any,
        sharding: TensorSharding,
        exchange: Callable[[Any], list[Any]],
        *,
        has_parts: bool = True,
    ) -> None:
        self._guard, self._example = guard, example
        self._sharding, self._exchange, self._has_parts = sharding, exchange, has_parts
        self._unknown = scopes_of_unknown(sharding.spec, model)
        self._known: dict[tuple[str, int], KnownDraws] = {}
        self._shown: KnownDraws | None = None
        self._has_agreed = False  # in training
        if not has_parts:
            found = cuts_of_example(model, example, sharding)
            if found is not None:
                self._shown = KnownDraws(scopes=scopes_of(found), otherwise=lambda: self._unknown)

    def known(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], num_rows: int
    ) -> KnownDraws:
        """Return what is known of the draws of a call.

        Every rank that shares the batch must call this: in a form of call that is new they tell
        each other what they found, since it may depend on values.
        """
        if self._shown is not None:
            return self._shown
        # Whoever looked where rows depend on each other has just told the form.
        key = self._guard.latest or self._guard.key(model, args, kwargs)
        if key not in self._known:
            found = self._find(key, model, args, kwargs, num_rows)
            scopes = None if found is None else scopes_of(found) | scopes_apart(found, model)
            self._known[key] = KnownDraws(scopes=scopes, otherwise=lambda: self._scopes_of_example)
        return self._known[key]

    @functools.cached_property
    def _scopes_of_example(self) -> Mapping[str, Scope]:
        whole = self._guard.whole
        found = None
        if whole is not None:
            found = in_fresh_thread(
                lambda: cuts_of_example(whole, self._example, self._sharding), of=whole
            )
        return scopes_of(found) if found else self._unknown

    def _find(
        self,
        key: tuple[str, int],
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_rows: int,
    ) -> Cuts | None:
        given = pytree.tree_map_only(Tensor, plain, (tuple(args), dict(kwargs)))
        dims, found = self._guard.row_dims(key), None
        are_graphs = self._guard.is_of_graphs(key) or not self._has_parts
        with contextlib.suppress(RowCheckError, DryRunError, ObservationError):
            if are_graphs and num_nodes_of(given) is not None:
                found = in_fresh_thread(lambda: self._cuts_of_graphs(model, given), of=model)
            else:
                found = in_fresh_thread(lambda: self._cuts(model, given, num_rows, dims), of=model)
        if found is not None and self._may_be_alone(found):
            return found
        self._has_agreed |= torch.is_grad_enabled()
        ranks = self._exchange((key[0], found))
        return _agreed([each for form, each in ranks if form == key[0]])

    def _may_be_alone(self, found: Cuts) -> bool:
        """Whether a call need no word of other ranks, who may not call the model, or otherwise.

        One rank may evaluate alone. In training one rank may have a batch without images, say, a
        form that is new to this one only. What is drawn as shapes say is no other rank's affair.
        """
        if not torch.is_grad_enabled():
            return not found
        told = (cut is not None and not cut.of_values for cut in found.values())
        return self._has_agreed and all(told)

    def _cuts(self, model: nn.Module, given: Given, num_rows: int, dims: RowDims) -> Cuts:
        once, twice, others = _batches(given, num_rows, dims)
        if not self._has_parts:
            twice = others = once  # where the rows are does not matter
        noted = self._noted(model, once, twice, others)
        cuts = noted.cuts(self._sharding)
        folded = [key for key, cut in cuts.items() if noted.is_folded(key, cut, _NUM_ROWS)]
        alone = {
            key: cut if cut is None or cut.rows is None else replace(cut, alone=True)
            for key, cut in cuts.items()
            if key not in folded
        }
        if not folded:
            return alone
        return alone | self._ordered(model, once, twice, {key: cuts[key] for key in folded}, dims)

    def _cuts_of_graphs(self, model: nn.Module, given: Given) -> Cuts:
        """Return cuts of draws of a batch of graphs; None of those of nodes, edges and graphs.

        Ranks have other numbers of these, so that no part of a draw of one device is a rank's.
        """
        twice, once, _ = next(graph_batches(given, alike=True))
        _, _, others = next(graph_batches(given))
        if not self._has_parts:
            return self._noted(model, once, once, once).cuts(self._sharding)
        cuts = self._noted(model, once, twice, others).cuts(self._sharding)
        return {key: cut if cut and cut.rows is None else None for key, cut in cuts.items()}

    def _noted(self, model: nn.Module, once: Given, twice: Given, others: Given) -> Noted:
        whole = self._guard.whole
        if whole is None:
            raise RowCheckError(f"{type(model).__name__} cannot be copied")
        subject = deep_copied(whole).double()
        for tensor in (*subject.parameters(), *subject.buffers()):
            if tensor.is_complex():
                tensor.data = tensor.data.to(torch.complex128)
        for module, live in pairs(subject, model):
            module.training = live.training
        try:
            with InDouble():
                return drawn_by_shape(subject, once, twice, self._sharding)
        except DryRunError:
            if self._sharding.size > 1:
                raise
        subject, is_scaled_down = self._guard.subject(model)
        few = None if is_scaled_down else draws_with_values(subject, once)
        many = None if is_scaled_down else draws_with_values(subject, twice)
        if few is None or many is None:
            raise RowCheckError("it cannot be run")
        # Routers pick otherwise of other rows, and by weights of another sign.
        runs = ((subject, others), *((scaled_copy(subject, x), twice) for x in (-1.0, -0.5)))
        seen = (draws_with_values(each, batch) for each, batch in runs if twice is not once)
        return Noted(few, many, few, [each for each in seen if each is not None])

    def _ordered(
        self, model: nn.Module, once: Given, twice: Given, folded: Cuts, dims: RowDims
    ) -> dict[Draw, ShardedDraw | None]:
        """Return cuts of dims that rows share with something else, and how they lie in it."""
        unknown: dict[Draw, ShardedDraw | None] = dict.fromkeys(folded)
        try:
            subject, is_scaled_down = self._guard.subject(model)
        except RowCheckError:
            return unknown
        if is_scaled_down:
            once, twice = within(subject, once, dims), within(subject, twice, dims)
        known: dict[tuple[str, int, int], Rows | None] = {}
        for (fqn, index), cut in folded.items():
            if cut is None or cut.rows is None:
                continue
            kind = (generalize(fqn), index, cut.rows)
            if kind not in known:
                known[kind] = order_of_rows(
                    subject, once, twice, _NUM_ROWS, (fqn, index), cut.rows
                )
            rows = known[kind]
            if rows is not None:
                unknown[fqn, index] = replace(cut, inner=not rows.outermost)
        return unknown


def _agreed(ranks: Sequence[Cuts | None]) -> Cuts | None:
    """Return what all ranks found, None for what they did not find alike."""
    found = [each for each in ranks if each is not None]
    if len(found) < len(ranks):
        return None
    draws = {draw for each in found for draw in each}
    first = found[0]
    return {
        draw: functools.reduce(common, (each.get(draw) for each in found), first.get(draw))
        for draw in sorted(draws)
    }


def _batches(given: Given, num_rows: int, dims: RowDims) -> tuple[Given, Given, Given]:
    """Return a batch of a few rows, one of all of them twice, and one of them and others."""
    whole, half, _ = some_rows(given, num_rows, uneven=False, dims=dims)
    told = dict(dims)
    pairs = zip(pytree.tree_leaves(whole), pytree.tree_leaves(half), strict=False)
    if not any(isinstance(w, Tensor) and w.shape != h.shape for w, h in pairs):
        raise RowCheckError("no tensor is given that has rows")
    leaves, spec = pytree.tree_flatten(_doubled(whole, half))
    for index, bounds in enumerate(pytree.tree_leaves(whole)):
        if isinstance(told.get(index), Bounds):
            leaves[index] = bounds  # of rows as long as these
    return half, pytree.tree_unflatten(leaves, spec), whole


def _doubled(whole: Any, half: Any) -> Any:
    if isinstance(half, Tensor):
        dim = rows_dim(whole.shape, half.shape, 2)
        return half if dim is None else twice_over(half, Rows(dim), _NUM_ROWS)
    if type(half) in (list, tuple) and len(half) != len(whole):
        return half + half  # something for every row
    if isinstance(half, Mapping) and not children_of(half):
        return {key: _doubled(whole[key], each) for key, each in half.items()}
    wholes = iter(children_of(whole))
    return map_children(lambda each: _doubled(next(wholes), each), half)
