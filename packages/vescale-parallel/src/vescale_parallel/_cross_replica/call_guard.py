"""Know where rows depend on each other in every form of call of a model, before it runs in it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.blocks import blocks_of, pipeline_blocks
from vescale_parallel._model.copies import copied_without_values, pairs, plain
from vescale_parallel._model.fqns import generalize
from vescale_parallel._model.inputs import has_dims
from vescale_parallel._model.kept_outside import filled_by
from vescale_parallel._model.random_copies import in_double, random_copy
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._plan.plan import ParallelPlan
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.calls.call_signature import CallForms
from vescale_parallel._verify.calls.flags import ChangedFlags
from vescale_parallel._verify.equivalence import MAX_NUMEL
from vescale_parallel._verify.scaled_down_model import scaled_down

from .batches.packed_calls import PackedCalls
from .batches.search import RowSearch
from .batches.seen import (
    Seen,
    doubtful_leaves,
    less_dependent,
    refusal,
    two_batches,
    unusual_dims_of,
)
from .batches.small_batches import with_any_ids
from .borders import NOWHERE, RowCoupling, joined
from .check import CannotRunError
from .dims.listed_rows import dims_of_lists, rows_in_lists
from .dims.packed_rows import is_packed
from .dims.row_counts import RowDims, is_of_list, other_dims
from .hooks.pure_hooks import pure_hooks, put_pure_hooks
from .runs import seeded

# Parameters above which a scaled-down model is looked at, if there is one: a second or less.
_MANY = 2**22


class RowGuard:
    """Finds out, once for each form of call, where rows of the batch depend on each other.

    Args:
        model: Still whole; what a check needs of it is copied.
        exchange: Returns what every rank that shares a batch has for a value.
        losses_only: Whether, in training, numbers that have no gradient do not matter.
        in_one_piece: Whether this rank's rows are the batch, if they are not cut: then they do in
            evaluation.
        in_parts: Whether this rank's rows may run in micro-batches.
        num_ranks: How many ranks share a batch.

    Attributes:
        is_rows_first: Whether rows are known to be the first dim of a call's tensors, as of a
            batch that a loader of this package gave.
        are_rows_apart: Whether rows of ranks, one behind the other, are in another order than one
            device's.
        whole: A copy of the model without values; None if it cannot be copied.
        latest: The form of the latest call; None before the first one.
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: Callable[[Any], list[Any]],
        *,
        losses_only: bool = False,
        in_one_piece: bool = True,
        in_parts: bool = True,
        num_ranks: int = 1,
    ) -> None:
        self._in_one_piece, self._in_parts = in_one_piece, in_parts
        self._num_ranks = num_ranks
        self._exchange, self._losses_only = exchange, losses_only
        self._skips_numbers = losses_only
        self._forms, self._flags = CallForms(model), ChangedFlags(model)
        self.whole = copied_without_values(model)
        self._blocks = frozenset(map(generalize, blocks_of(model)))
        self._known: dict[tuple[str, int], RowCoupling] = {}
        self._trained: dict[str, RowCoupling] = {}
        self._unchecked: set[tuple[str, int]] = set()
        self._dims: dict[tuple[str, int], RowDims] = {}
        self._packed = PackedCalls()
        self._filled = set[str]()  # by blocks, in a trial
        self.latest: tuple[str, int] | None = None
        self.is_rows_first: Callable[[Any], bool] = lambda tree: False
        self.are_rows_apart: Callable[[Any], bool] = lambda tree: False

    def coupling(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[RowCoupling, bool]:
        """Return where rows depend on each other in a call, and whether that could be checked.

        Every rank that shares the batch must call this, unless gradients are off and rows are
        not coupled: in a form of call that is new they tell each other where, since that may
        depend on values.

        Raises:
            ValueError: If ranks are called in different forms.
        """
        key = self.latest = self.key(model, args, kwargs)
        is_new = key not in self._known and not torch.is_grad_enabled()
        # In training other things matter, if only losses do.
        if is_new and not self._losses_only and key[0] in self._trained:
            # Where all ranks agreed that rows depend on each other in training they may do now.
            self._known[key] = self._trained[key[0]]
        if key not in self._known:
            self._known[key] = self._find(key, model, args, kwargs)
        if torch.is_grad_enabled():
            self._trained[key[0]] = self._known[key]
        return self._known[key], key not in self._unchecked

    def with_packed(
        self,
        coupling: RowCoupling,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> RowCoupling:
        """Return what is known of the latest call with the tensors told that it packs.

        Nobody communicates: how a rank's rows are cut is its own affair.

        Raises:
            PackedRowsError: If it cannot be told which rows their elements are of.
        """
        key = self.latest
        assert key is not None
        return self._packed.told(
            key,
            coupling,
            self.row_dims(key),
            model,
            (tuple(args), dict(kwargs)),
            lambda: self._search(model, args, kwargs, None),
        )

    def _search(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        known_rows: int | None,
    ) -> RowSearch:
        given = pytree.tree_map_only(Tensor, plain, (tuple(args), dict(kwargs)))
        return RowSearch(
            model,
            given,
            known_rows,
            lambda: self.subject(model),
            losses_only=self._losses_only,
            skips_numbers=self._skips_numbers,
            filled=lambda: self._filled,
            listed=dims_of_lists(*given)
            if known_rows and known_rows == rows_in_lists(*given)
            else (),
            blocks=self._blocks if self._in_parts else None,
            num_ranks=self._num_ranks,
        )

    def key(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Return what tells the forms of call apart."""
        modes = tuple(module.training for module in model.modules()), self._flags.of(model)
        # Where rows are is known by leaf, and keywords may come in any order.
        order = tuple(self._forms.named(args, kwargs))
        about = torch.is_grad_enabled(), modes, order, pure_hooks(model)
        return self._forms.form(args, kwargs), hash(about)

    def _find(
        self,
        key: tuple[str, int],
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> RowCoupling:
        is_cut = torch.is_grad_enabled() or not self._in_one_piece
        self._skips_numbers = self._losses_only and is_cut
        search = self._search(model, args, kwargs, self._known_rows(args, kwargs))
        seen = search.seen(key[0])
        elsewhere = functools.partial(self._with_other_dims, key, search)

        def in_groups(seen: Seen) -> Seen:
            """Return what more rows show where the model does not run on few."""
            if not seen.why or seen.is_wrong:
                return seen
            again = search.seen(key[0], in_groups=True)
            return seen if again.why and not again.is_wrong else again

        def alone() -> RowCoupling | None:
            """Return what this rank sees without a word to others, None if rows are coupled."""
            if seen.found.regions or seen.found.added:
                return None
            if (found := elsewhere([seen], lambda mine: [mine])) is None:
                again = in_groups(seen)
                found = again.found
                if torch.is_grad_enabled() and again.is_wrong:
                    raise ValueError(again.why)
                if torch.is_grad_enabled() and again.why and not found.regions:
                    self._doubt(key, again.why)
            return None if found.regions else found

        if self._may_be_alone() and (found := alone()) is not None:
            return found
        ranks: list[Seen] = self._exchange(seen)
        forms = {each.form for each in ranks}
        if len(forms) > 1:
            found = None
            with contextlib.suppress(ValueError):  # which others are to know of, too
                found = alone()
            if not all(self._exchange(found is not None)) or found is None:
                raise ValueError(
                    "expected ranks that share a batch to call the model alike where rows of it "
                    f"depend on each other, got {sorted(forms)}"
                )
            return found
        if (found := elsewhere(ranks, self._exchange)) is not None:
            return found
        if any(each.why and not each.is_wrong for each in ranks):
            ranks = self._exchange(in_groups(seen))
        if (why := refusal(ranks)) is not None:
            raise ValueError(why)
        doubts = [each.why for each in ranks if each.why]
        if doubts:
            self._doubt(key, doubts[0])
        return joined([each.found for each in ranks])

    def _known_rows(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
        """Return how many rows a call has, if that is known without running it."""
        leaves = filter(has_dims, pytree.tree_leaves((args, kwargs)))
        first = next((x.shape[0] for x in leaves if self.is_rows_first(x)), None)
        return rows_in_lists(args, kwargs) or first

    def _may_be_alone(self) -> bool:
        """Whether other ranks may not call the model now, or call it in another form.

        One rank may evaluate alone. In training all ranks call it, the first time in forms that
        are new to all; later one rank may have a batch without images, which is new to it alone.
        """
        known = self._trained.values()
        is_known = bool(known) and not any(each.regions or each.added for each in known)
        return is_known or not torch.is_grad_enabled()

    def _doubt(self, key: tuple[str, int], why: str) -> None:
        self._unchecked.add(key)
        warn_at_user_line(
            "it could not be checked whether rows of the batch depend on each other in this "
            "call, which data-parallel ranks would then compute from their own rows only: "
            f"{why}"
        )

    def _with_other_dims(
        self,
        key: tuple[str, int],
        search: RowSearch,
        ranks: Sequence[Seen],
        exchange: Callable[[Any], list[Any]],
    ) -> RowCoupling | None:
        """Return where rows depend on each other if they are where shapes do not say.

        Raises:
            ValueError: If nothing but shapes says where they are, and two dims are as long.
        """
        joint = joined([each.found for each in ranks])
        known = None if any(each.why for each in ranks) else joint
        doubtful = doubtful_leaves(ranks)
        unusual = unusual_dims_of(ranks, known)
        if not doubtful and not unusual:
            return None
        others = other_dims(unusual, doubtful, len(ranks[0].values))
        better = less_dependent(exchange(search.of_dims(others)), known)
        if better is None:
            return None
        dims, coupling = better
        is_doubtful = known is not None and (is_of_list(dims) or not known.fails)
        if known is not None and is_doubtful and dims in unusual and not is_packed(dims):
            raise ValueError(two_batches(known, coupling, dims))
        self._dims[key] = dims
        return coupling

    def is_of_graphs(self, key: tuple[str, int]) -> bool:
        """Whether every rank is known to have graphs of its own in a form of call."""
        return self._known.get(key, NOWHERE).of_graphs

    def row_dims(self, key: tuple[str, int]) -> RowDims:
        """Return the dims of the rows in a form of call where shapes would mislead."""
        return self._packed.dims.get(key, self._dims.get(key, ()))

    def subject(self, model: nn.Module) -> tuple[nn.Module, bool]:
        """Return what to run: the model with random values, or a scaled-down one."""
        whole = self.whole
        if whole is None:
            raise CannotRunError(f"{type(model).__name__} cannot be copied")
        numel = sum(p.numel() for p in whole.parameters())
        scaled = scaled_down(whole, 1) if numel > _MANY else None
        if scaled is None and numel > MAX_NUMEL:
            raise CannotRunError(
                f"{type(model).__name__} has {numel} parameters, more than the {MAX_NUMEL} that "
                "are run to see, and no configuration to make a smaller one by"
            )
        self._flags.put_on(whole if scaled is None else scaled, model)
        with seeded():
            subject = random_copy(whole if scaled is None else scaled)
            put_pure_hooks(subject, model)
        if self._losses_only:
            with contextlib.suppress(ValueError):  # it has no blocks
                self._filled = filled_by(subject, pipeline_blocks(subject))
        if scaled is not None:
            return with_any_ids(subject).train(model.training), True
        for module, live in pairs(subject, model):
            module.training = live.training
            for name, buffer in live.named_buffers(recurse=False):
                if type(buffer) in (Tensor, nn.Buffer) and buffer.device.type != "meta":
                    module._buffers[name] = in_double(buffer)
        for parameter in subject.parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        return subject, False


def row_guard(
    plan: ParallelPlan, model: nn.Module, exchange: Callable[[Any], list[Any]]
) -> RowGuard | None:
    """Return what finds where rows depend on each other; None where a plan takes none apart."""
    num_ranks, num_parts = plan.data_parallel.size, plan.num_microbatches
    if num_ranks * num_parts == 1:
        return None
    return RowGuard(
        model,
        exchange,
        # What a pipeline returns besides its loss is nothing.
        losses_only=plan.pipeline_parallel.size > 1,
        in_one_piece=num_ranks == 1,
        in_parts=num_parts > 1,
        num_ranks=num_ranks,
    )
