"""Know where rows depend on each other in every form of call of a model, before it runs in it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vescale_parallel._model.blocks import pipeline_blocks
from vescale_parallel._model.copies import copied_without_values, pairs, plain
from vescale_parallel._model.inputs import has_dims
from vescale_parallel._model.kept_outside import (
    filled_by,
    filled_error,
    handed_over_error,
    nothing_kept_outside,
)
from vescale_parallel._model.random_copies import in_double, random_copy
from vescale_parallel._model.user_line import warn_at_user_line
from vescale_parallel._torch_private import pytree
from vescale_parallel._verify.calls.call_signature import CallForms
from vescale_parallel._verify.calls.flags import ChangedFlags
from vescale_parallel._verify.equivalence import MAX_NUMEL
from vescale_parallel._verify.freed_memory import give_memory_back
from vescale_parallel._verify.scaled_down_model import scaled_down
from vescale_parallel._verify.threads import in_fresh_thread

from .batches.graphs import coupling_of_call
from .batches.num_rows import check_more_rows, chosen_num_rows, is_first_dim, row_counts_to_try
from .batches.small_batches import extremes_of, holds_rows, some_rows, within
from .borders import (
    NOWHERE,
    RowCoupling,
    Seen,
    doubtful_leaves,
    joined,
    less_dependent,
    two_batches,
    with_regions_of,
)
from .check import CannotRunError, Given, row_coupling
from .gradients_of_parts import NoNumbersError
from .parts import NUM_ROWS
from .row_counts import (
    RowDims,
    is_of_list,
    likely_row_counts,
    other_dims,
    unusual_dims,
    values_of_rows,
)
from .runs import NotFewerRowsError, RowCheckError, seeded

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
    ) -> None:
        self._in_one_piece = in_one_piece
        self._exchange, self._losses_only = exchange, losses_only
        self._skips_numbers = losses_only
        self._forms, self._flags = CallForms(model), ChangedFlags(model)
        self.whole = copied_without_values(model)
        self._known: dict[tuple[str, int], RowCoupling] = {}
        self._trained: dict[str, RowCoupling] = {}
        self._unchecked: set[tuple[str, int]] = set()
        self._dims: dict[tuple[str, int], RowDims] = {}
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

    def key(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Return what tells the forms of call apart."""
        modes = tuple(module.training for module in model.modules()), self._flags.of(model)
        return self._forms.form(args, kwargs), hash((torch.is_grad_enabled(), modes))

    def _find(
        self,
        key: tuple[str, int],
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> RowCoupling:
        given = pytree.tree_map_only(Tensor, plain, (tuple(args), dict(kwargs)))
        leaves = filter(has_dims, pytree.tree_leaves((args, kwargs)))
        known_rows = next((x.shape[0] for x in leaves if self.is_rows_first(x)), None)
        is_cut = torch.is_grad_enabled() or not self._in_one_piece
        self._skips_numbers = self._losses_only and is_cut
        seen = in_fresh_thread(lambda: self._seen(key[0], model, given, known_rows), of=model)
        give_memory_back()
        elsewhere = functools.partial(self._with_other_dims, key, model, given, known_rows)

        def in_groups(seen: Seen) -> Seen:
            """Return what more rows show where the model does not run on few."""
            if not seen.why or seen.is_wrong:
                return seen
            more = functools.partial(self._seen, key[0], model, given, known_rows, in_groups=True)
            again = in_fresh_thread(more, of=model)
            give_memory_back()
            return seen if again.why and not again.is_wrong else again

        if not torch.is_grad_enabled() and not seen.found.regions and not seen.found.added:
            # Without a word to others: one rank may evaluate alone.
            if (found := elsewhere([seen], lambda mine: [mine])) is not None:
                return found
            if not (seen := in_groups(seen)).found.regions:
                return seen.found
        ranks: list[Seen] = self._exchange(seen)
        forms = {each.form for each in ranks}
        if len(forms) > 1:
            raise ValueError(
                f"expected ranks that share a batch to call the model alike, got {sorted(forms)}"
            )
        if (found := elsewhere(ranks, self._exchange)) is not None:
            return found
        if any(each.why and not each.is_wrong for each in ranks):
            ranks = self._exchange(in_groups(seen))
        refusals = [each.why for each in ranks if each.is_wrong]
        if refusals:
            raise ValueError(refusals[0])
        doubts = [each.why for each in ranks if each.why]
        if doubts:
            self._unchecked.add(key)
            warn_at_user_line(
                "it could not be checked whether rows of the batch depend on each other in this "
                "call, which data-parallel ranks would then compute from their own rows only: "
                f"{doubts[0]}"
            )
        return joined([each.found for each in ranks])

    def _with_other_dims(
        self,
        key: tuple[str, int],
        model: nn.Module,
        given: Given,
        known_rows: int | None,
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
        may_be_unusual = known is None or bool(known.regions)
        unusual = max((each.unusual for each in ranks), key=len) if may_be_unusual else ()
        if not doubtful and not unusual:
            return None
        others = other_dims(unusual, doubtful, len(ranks[0].values))
        found = in_fresh_thread(lambda: self._of_dims(model, given, known_rows, others), of=model)
        give_memory_back()
        better = less_dependent(exchange(found), known)
        if better is None:
            return None
        dims, coupling = better
        if known is not None and dims in unusual and (is_of_list(dims) or not known.fails):
            raise ValueError(two_batches(known, coupling, dims))
        self._dims[key] = dims
        return coupling

    def is_of_graphs(self, key: tuple[str, int]) -> bool:
        """Whether every rank is known to have graphs of its own in a form of call."""
        return self._known.get(key, NOWHERE).of_graphs

    def row_dims(self, key: tuple[str, int]) -> RowDims:
        """Return the dims of the rows in a form of call where shapes would mislead."""
        return self._dims.get(key, ())

    def _seen(
        self,
        form: str,
        model: nn.Module,
        given: Given,
        known_rows: int | None,
        *,
        in_groups: bool = False,
    ) -> Seen:
        found, why, is_wrong = NOWHERE, "", False
        try:
            with nothing_kept_outside(model) as outside:
                found = self._check(model, given, known_rows, in_groups)
                handed_over = outside.handed_over() if self._losses_only else []
            for name, _ in handed_over:
                raise ValueError(handed_over_error(name))
            if self._filled:
                raise ValueError(filled_error(min(self._filled)))
        except RowCheckError as error:
            why, is_wrong = str(error), not isinstance(error, CannotRunError)
            found = replace(found, fails=not is_wrong or isinstance(error, NotFewerRowsError))
        unusual = unusual_dims(*given, is_known=known_rows is not None)
        return Seen(form, found, why, is_wrong, values_of_rows(*given), unusual)

    def _of_dims(
        self, model: nn.Module, given: Given, known_rows: int | None, others: Iterable[RowDims]
    ) -> dict[RowDims, RowCoupling]:
        """Return where rows depend on each other if they are along other dims."""
        found: dict[RowDims, RowCoupling] = {}
        for dims in others:
            with contextlib.suppress(RowCheckError, NoNumbersError):
                found[dims] = self._check_rows(model, given, known_rows, dims)
                if not found[dims].regions:
                    break
        return found

    def _check(
        self, model: nn.Module, given: Given, known_rows: int | None, in_groups: bool
    ) -> RowCoupling:
        return coupling_of_call(
            lambda: self.subject(model)[0],
            given,
            lambda: self._check_rows(model, given, known_rows, in_groups=in_groups),
            losses_only=self._skips_numbers,
        )

    def _check_rows(
        self,
        model: nn.Module,
        given: Given,
        known_rows: int | None,
        dims: RowDims = (),
        *,
        in_groups: bool = False,
    ) -> RowCoupling:
        leaves = pytree.tree_leaves(given)
        if any(map(holds_rows, leaves)):
            raise CannotRunError("an object is given that holds tensors, a cache for example")
        subject, is_scaled_down = self.subject(model)
        elsewhere = {index for index, dim in dims if dim is None}
        rest = tuple(x for index, x in enumerate(leaves) if index not in elsewhere), {}
        told = rest if elsewhere else given
        found: dict[int, RowCoupling] = {}
        errors: list[CannotRunError] = []
        for num_rows in likely_row_counts(*told) if known_rows is None else [known_rows]:
            counts = row_counts_to_try(num_rows, in_groups=in_groups)
            batches = (
                (num_few, some_rows(given, num_rows, uneven=uneven, dims=dims, num_few=num_few))
                for num_few in counts
                for uneven in (True, False)
            )
            try:
                coupling = self._coupling_of(subject, batches, is_scaled_down)
                if coupling.fails and num_rows in counts:
                    check_more_rows(subject, given, num_rows, dims, is_scaled_down=is_scaled_down)
            except CannotRunError as error:
                errors.append(error)
                continue
            found[num_rows] = coupling
            # Steps of time, taken for rows, are coupled; rows mostly are not.
            if not coupling.regions:
                break
        if not errors and not found:
            raise CannotRunError("no tensor is given that has rows")
        if not found:
            raise errors[0]
        chosen = chosen_num_rows(found, told)
        alike = self._of_rows_alike(subject, given, chosen, is_scaled_down, dims)
        both = with_regions_of(found[chosen], alike)
        # Positions of a text may run where rows that are made up do not: they are mostly coupled.
        if errors and both.regions and not is_first_dim(chosen, told):
            raise errors[0]
        return replace(both, fails=True) if errors and both.regions and not dims else both

    def _of_rows_alike(
        self,
        subject: nn.Module,
        given: Given,
        num_rows: int,
        is_scaled_down: bool,
        dims: RowDims,
    ) -> RowCoupling:
        """Return where rows depend on each other if no two halves share a value.

        A loss without a single target that counts, for example, may be computed otherwise.
        """
        batches = (
            (NUM_ROWS, some_rows(given, num_rows, uneven=False, alike=kind, dims=dims))
            for kind in extremes_of(subject)
        )
        try:
            return self._coupling_of(subject, batches, is_scaled_down)
        except (CannotRunError, NoNumbersError):
            return NOWHERE  # such rows need not fit the model

    def _coupling_of(
        self,
        subject: nn.Module,
        batches: Iterable[tuple[int, list[Given]]],
        is_scaled_down: bool,
    ) -> RowCoupling:
        """Return what the first batch shows that the model runs on, each with both halves."""
        errors: list[CannotRunError] = []
        for num_rows, batch in batches:
            if is_scaled_down:
                batch = pytree.tree_map_only(Tensor, within(subject), batch)
            whole, *halves = batch
            try:
                found = row_coupling(
                    subject, whole, halves, num_rows=num_rows, losses_only=self._skips_numbers
                )
            except CannotRunError as error:
                errors.append(error)
                continue
            return found.as_patterns() if is_scaled_down else found
        raise errors[-1] if errors else CannotRunError("no other number of rows is likely")

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
        if self._losses_only:
            with contextlib.suppress(ValueError):  # it has no blocks
                self._filled = filled_by(subject, pipeline_blocks(subject))
        if scaled is not None:
            return subject.train(model.training), True
        for module, live in pairs(subject, model):
            module.training = live.training
            for name, buffer in live.named_buffers(recurse=False):
                if type(buffer) in (Tensor, nn.Buffer) and buffer.device.type != "meta":
                    module._buffers[name] = in_double(buffer)
        for parameter in subject.parameters():
            parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())
        return subject, False
